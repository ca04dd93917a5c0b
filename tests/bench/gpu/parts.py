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
    Part("checks", "checks:run", 110, "each kernel against float64, on fresh inputs, its memory poisoned"),
    Part("kernels", "timed:run", 100, "each kernel's time, bytes, FLOPs and share of its floor"),
    Part("steps-0.6b", "steps:run_small", 50, "decode and prefill steps of Qwen3-0.6B beside their floors"),
    Part("steps-8b", "steps:run_large", 130, "the same of Llama-3.1-8B"),
    Part("where-0.6b", "where:run_small", 60, "kernel times by name of Qwen3-0.6B's decode steps, and of its prompts"),
    Part("where-8b", "where:run_large", 90, "the same of Llama-3.1-8B"),
    Part("workload", "workload:run", 80, "256 requests, prompts and answers of 100 to 1024 tokens, through the engine"),
    Part("transformers", "transformers_batching:run", 130, "the same requests through transformers' batching"),
    Part(
        "gates",
        "gates:run",
        80,
        "the same answers with graphs and without, at any depth, preempted or not, in any company",
    ),
    Part("sanitizer", "sanitizer:run", 70, "the kernels on tiny shapes under compute-sanitizer: memcheck, racecheck"),
)
LIMIT_S = 900  # of all parts together
PART_LIMIT_S = 240
