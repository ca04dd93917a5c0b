"""The parts of a run, in the order of their value: what each may take, and which of them share a process."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Part:
    """Runs by `module.function(place)`."""

    name: str
    function: str  # module:function of `tests.bench.gpu.parts`, or of a module with its whole name
    group: str  # neighbours of one group share a process, and the model in it
    limit_s: float
    least_s: float  # with less left it is not begun
    about: str
    is_beside: bool = False  # on the host, beside the parts behind it
    after: tuple[str, ...] = ()  # of those beside: which must have ended
    has_place: bool = True  # False: gets nothing but a function that writes rows


BUDGET_S = 540.0
WARM = ("torch", "triton", "tests.bench.gpu.parts.steps")  # what most parts import
COMPILE, COMPILE_STEPS = ("compile",), ("compile-steps",)
SWEEPS = "tests.bench.gpu.sweeps"
PARTS = (
    Part(
        *("compile", f"{SWEEPS}.ahead:run", "host", 45.0, 1.0, "attention, checked and candidates, by many processes"),
        is_beside=True,
        has_place=False,
    ),
    Part(
        *("compile-steps", f"{SWEEPS}.ahead:run_steps", "host", 110.0, 1.0, "models' steps and forms of products"),
        is_beside=True,
        has_place=False,
    ),
    Part("capture", "capture:run", "card", 20.0, 3.0, "whether graphs with branches and early launches hold"),
    Part("card", "card:run", "card", 15.0, 3.0, "the ceilings of the card, and what a launch costs in a graph"),
    Part("correct", "checks:run_hot", "kernels", 15.0, 5.0, "attention and sampling against float64", after=COMPILE),
    Part("attention", f"{SWEEPS}.attention:run", "kernels", 50.0, 10.0, "tilings, beside today's and the floor"),
    Part(
        *("products", f"{SWEEPS}.products:run", "kernels", 50.0, 15.0, "forms of products of few rows, beside cuBLAS"),
        after=COMPILE_STEPS,
    ),
    Part("experts", "experts:run", "kernels", 25.0, 10.0, "layers of OLMoE and Qwen3-30B-A3B, with some tilings"),
    Part("steps", "steps:run_small", "small", 60.0, 15.0, "steps of Qwen3-0.6B, shipped against the best just found"),
    Part("where", "where:run", "small", 15.0, 5.0, "the kernels of a step by name"),
    Part("ncu", "profiler:run", "ncu", 20.0, 15.0, "NVIDIA's profiler over attention, where it is installed"),
    Part("workload", "workload:run", "workload", 50.0, 25.0, "256 requests, one stream, one grammar among 64"),
    Part("steps-fp8", "steps:run_fp8", "fp8", 12.0, 8.0, "steps of Qwen3-0.6B over an fp8 cache"),
    Part("steps-8b", "steps:run_large", "large", 40.0, 20.0, "steps of Llama-3.1-8B"),
    Part("steps-lora", "adapters:run", "large", 23.0, 15.0, "the same with LoRA adapters, against none"),
    Part("kinds", "kinds:run", "kinds", 20.0, 10.0, "recurrent layers, two head sizes and latents answer as PyTorch's"),
    Part("gates", "gates:run", "gates", 35.0, 25.0, "the same answers with any setting, in any company"),
    Part("sanitizer", "sanitizer:run", "sanitizer", 20.0, 15.0, "the kernels, tiny, under compute-sanitizer"),
    Part("transformers", "transformers_batching:run", "peers", 35.0, 35.0, "the workload by transformers' batching"),
    Part("checks", "checks:run_others", "rest", 15.0, 8.0, "the other kernels against float64"),
    Part("kernels", "kernels:run", "rest", 20.0, 8.0, "each kernel's time beside its floor"),
)
DRY_LIMIT_S = 300.0
DRY_PARTS = tuple(
    replace(part, limit_s=DRY_LIMIT_S, least_s=0.0, group=part.group if part.is_beside else "dry") for part in PARTS
)
