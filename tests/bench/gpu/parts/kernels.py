"""How long each kernel takes at the sizes of real models, beside what it must move and compute, and matrix products
beside them, which are a vendor's and most of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator

from millrace.kernels import kernel_set
from millrace.kernels.checks.roofline import LaunchCost
from millrace.kernels.kernel_set import KernelSet
from tests.bench.gpu.floors import GPU_SHAPES
from tests.bench.gpu.place import TINY, Place
from tests.bench.gpu.trials.attention import timed_trials
from tests.bench.gpu.trials.layers import Widths, copy_trial, norm_trials, prologue_trial
from tests.bench.gpu.trials.lora import lora_trials
from tests.bench.gpu.trials.sampling import sampling_trials
from tests.bench.gpu.trials.steps import step_trials
from tests.bench.gpu.trials.timing import clock_of
from tests.bench.gpu.trials.trial import Trial, unchecked

DRAWN: tuple[dict[str, Any], ...] = ({"temperature": 0.8, "seed": 1},)
CUT: tuple[dict[str, Any], ...] = ({"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 1},)
PENALISED: tuple[dict[str, Any], ...] = ({"temperature": 0.8, "repetition_penalty": 1.1, "seed": 1},)
DECODES = ((1, 1024), (64, 1024), (256, 1024), (64, 8192))  # sequences, tokens of each
MOST_SAMPLED = 256
MOST_LAYERS = 4  # of a cache, of which one is read: all of them would not fit on every card
PROMPTS = (512, 2048, 8192)
RANK = 16  # of adapters, as in the part `steps-lora`


def run(place: Place) -> None:
    """The part `kernels`."""
    kernels, clock = kernel_set.load("triton"), clock_of(place.device)
    for name, shape in {"tiny": TINY}.items() if place.is_dry else GPU_SHAPES.items():
        for trial in place.in_time(_trials(place, kernels, shape)):
            with place.trying(f"{name} {trial.name}"):
                place.tell({"shape": name, **row_of(place, trial, clock.us(trial.launch))})


def row_of(place: Place, trial: Trial, us: float) -> dict[str, Any]:
    """The time of a kernel beside its floor."""
    floor_us = 1e6 * trial.cost.floor_s(place.card.bytes_per_s, place.card.flops_per_s)
    return {
        "kernel": trial.name,
        "us": us,
        "bytes": trial.cost.num_bytes,
        "flops": trial.cost.num_flops,
        "floor_us": floor_us,
        "floor_share": floor_us / us,
    }


def _trials(place: Place, kernels: KernelSet, shape: dict[str, Any]) -> Iterator[Trial]:
    """One at a time, so that the memory of one serves the next."""
    from millrace.kernels.triton import step_state as triton_step

    draw = torch.Generator(place.device).manual_seed(place.seed)
    widths, dtype, num_layers = Widths.of(shape), place.dtype, shape["num_hidden_layers"]
    num_read = min(num_layers, MOST_LAYERS)
    has_norms = shape["model_type"] == "qwen3"
    for num_tokens in (2,) if place.is_dry else (1, 256, 8192):
        yield from norm_trials(kernels, widths, num_tokens, dtype, draw)
        yield prologue_trial(kernels, widths, num_tokens, dtype, draw, has_norms=has_norms)
        if not place.is_dry:
            yield prologue_trial(kernels, widths, num_tokens, dtype, draw, has_norms=has_norms, is_fp8=True)
    for num_tokens in (2,) if place.is_dry else (1, 16, 64, 256, 8192):
        yield from product_trials(widths, shape["vocab_size"], num_tokens, dtype, draw)
    block_bytes = 2 * num_layers * widths.num_groups * 16 * widths.head_dim * dtype.itemsize
    yield copy_trial(kernels, block_bytes, 1 if place.is_dry else 64, draw)
    for num_rows, context in ((2, 40),) if place.is_dry else DECODES:
        load = [(1, context)] * num_rows
        yield from timed_trials(kernels, widths, num_read, load, dtype, draw)
        if context == 1024 and num_rows == 256 or place.is_dry:
            yield from timed_trials(kernels, widths, num_read, load, dtype, draw, is_block_major=False)
            yield from timed_trials(kernels, widths, num_read, load, dtype, draw, is_fp8=True)
    for num_tokens in (9,) if place.is_dry else PROMPTS:
        yield from timed_trials(kernels, widths, num_read, [(num_tokens, num_tokens)], dtype, draw)
    mixed = [(1, 20), (7, 30)] if place.is_dry else [*[(1, 1024)] * 64, (512, 2048)]
    yield from timed_trials(kernels, widths, num_read, mixed, dtype, draw)
    for num_rows in (2,) if place.is_dry else (1, 256):
        yield from step_trials(triton_step, num_rows, 9 if place.is_dry else 1024, place.device)
    adapters = kernel_set.load_lora("triton")
    for num_tokens, num_adapters in ((3, 2),) if place.is_dry else ((1, 1), (64, 8), (64, 32), (2048, 4)):
        yield from lora_trials(adapters, widths, num_tokens, num_adapters, RANK, dtype, draw)
    sampler, vocab_size = kernel_set.load_sampling("triton"), shape["vocab_size"]
    for num_rows in (2,) if place.is_dry else (1, 64, 256):
        for asked in (({},), DRAWN, CUT, PENALISED):
            kind = "+".join(sorted(asked[0].keys() - {"seed"})) or "greedy"
            for trial in sampling_trials(sampler, num_rows, vocab_size, dtype, draw, asked):
                if _is_for(trial.name.split(" of ")[0], asked[0]):
                    yield Trial(f"{trial.name}, {kind}", trial.launch, trial.wrong, trial.cost)


def _is_for(kernel: str, asked: dict[str, Any]) -> bool:
    """Whether what is asked for is what this kernel is launched for."""
    is_cut, is_penalised = "top_k" in asked, "repetition_penalty" in asked
    if kernel == "choose_truncated":
        return is_cut
    if kernel in ("edit", "count_tokens"):
        return is_penalised
    return kernel == "choose" and not is_cut and not is_penalised or kernel == "score" and not asked


def product_trials(
    widths: Widths, vocab_size: int, num_tokens: int, dtype: torch.dtype, draw: Generator
) -> Iterator[Trial]:
    """The matrix products of a layer, and of the head, but for more rows than are sampled."""
    queries, groups = widths.num_heads * widths.head_dim, widths.num_groups * widths.head_dim
    sizes = {
        "qkv": (widths.hidden, queries + 2 * groups),
        "output": (queries, widths.hidden),
        "gate_up": (widths.hidden, 2 * widths.inner),
        "down": (widths.inner, widths.hidden),
        "head": (widths.hidden, vocab_size),
    }
    for name, (inner, outer) in sizes.items():
        if name == "head" and num_tokens > MOST_SAMPLED:
            continue
        x = torch.randn(num_tokens, inner, generator=draw, device=draw.device, dtype=dtype)
        weight = torch.randn(outer, inner, generator=draw, device=draw.device, dtype=dtype)
        num_numbers = x.numel() + weight.numel() + num_tokens * outer

        def launch(x: torch.Tensor = x, weight: torch.Tensor = weight) -> dict[str, torch.Tensor]:
            return {"out": torch.nn.functional.linear(x, weight)}

        product = LaunchCost(num_numbers * dtype.itemsize, 2 * num_tokens * inner * outer)
        yield Trial(f"product {name} of {num_tokens} x {inner} x {outer}", launch, unchecked, product)
