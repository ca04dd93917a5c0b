"""What the benchmark consists of: parts that run alone, in a process each, and in so many seconds at most."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Runs by `module.function(place)`."""

    name: str
    function: str  # module:function of this package
    limit_s: int
    about: str


PARTS = (
    Part("checks", "parts.checks:run", 110, "each kernel against float64, on fresh inputs, its memory poisoned"),
    Part("kernels", "parts.kernels:run", 100, "each kernel's time, bytes, FLOPs and share of its floor"),
    Part("steps-0.6b", "parts.steps:run_small", 50, "decode and prefill steps of Qwen3-0.6B beside their floors"),
    Part("steps-8b", "parts.steps:run_large", 130, "the same of Llama-3.1-8B"),
    Part("where-0.6b", "parts.where:run_small", 60, "kernel times by name of Qwen3-0.6B's steps"),
    Part("where-8b", "parts.where:run_large", 90, "the same of Llama-3.1-8B"),
    Part("workload", "parts.workload:run", 80, "256 requests of 100 to 1024 tokens and answers likewise"),
    Part("transformers", "parts.transformers_batching:run", 130, "the same requests through transformers' batching"),
    Part(
        "gates",
        "parts.gates:run",
        80,
        "the same answers with graphs and without, at any depth, preempted or not, in any company",
    ),
    Part("sanitizer", "parts.sanitizer:run", 70, "the kernels, tiny, under compute-sanitizer"),
)
LIMIT_S = 900  # of all parts together
PART_LIMIT_S = 240
