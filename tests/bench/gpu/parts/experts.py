"""The time of a layer of experts at OLMoE's and Qwen3-30B-A3B's sizes: checked, with other tilings, by the library.

The best tilings go into the run's table, as those of attention and products do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from typing import Any

import torch
import triton

from millrace.kernels import kernel_set
from millrace.kernels.checks.expert_cases import Rule
from millrace.kernels.layout.experts import RoutedExperts
from millrace.kernels.tilings.experts import ExpertProduct, ExpertShape, ExpertTiling
from millrace.kernels.tilings.tables import Tilings, write_table
from tests.bench.gpu.parts.kernels import row_of
from tests.bench.gpu.place import Place
from tests.bench.gpu.sweeps.attention import TABLE
from tests.bench.gpu.trials.experts import ExpertSizes, expert_trials, made_experts
from tests.bench.gpu.trials.timing import Clock, clock_of
from tests.bench.gpu.trials.trial import check

MODELS = ("OLMoE", "30B-A3B")
TINY_SIZES = ExpertSizes(5, 24, 16, 2, Rule())
TOKENS = (1, 4, 16, 64, 256, 2048)
CHECKED = (1, 64)  # numbers of tokens with which results are held against float64
CANDIDATES: dict[int, tuple[ExpertTiling, ...]] = {  # by the most tokens that they are tried with
    16: (
        ExpertTiling(block_m=16, block_n=16, block_k=256, num_stages=3),
        ExpertTiling(block_m=16, block_n=64, block_k=128, num_stages=3),
        ExpertTiling(block_m=16, block_n=32, block_k=64, num_stages=6),
    ),
    256: (
        ExpertTiling(block_m=16, block_n=64, block_k=128, num_stages=3),
        ExpertTiling(block_m=32, block_n=64, block_k=64, num_stages=4),
        ExpertTiling(block_m=64, block_n=64, block_k=64, num_stages=3),
    ),
    2048: (
        ExpertTiling(block_m=64, block_n=64, block_k=64, num_stages=4),
        ExpertTiling(block_m=128, block_n=64, block_k=64, num_warps=8, num_stages=3),
        ExpertTiling(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3),
    ),
}
DRY_CANDIDATES = (ExpertTiling(block_m=16, block_n=16, block_k=16, num_stages=2),)


def run(place: Place) -> None:
    """The part `experts`."""
    clock, best = clock_of(place.device), list[tuple[object, object, float]]()
    draw = torch.Generator(place.device).manual_seed(place.seed)
    for name in place.in_time(("tiny",) if place.is_dry else MODELS):
        sizes = TINY_SIZES if place.is_dry else ExpertSizes.of(name)
        experts = made_experts(sizes, place.dtype, draw)
        for num_tokens in place.in_time((3,) if place.is_dry else TOKENS):
            if place.is_chosen(f"{num_tokens} x {name}"):
                best += _measured(place, clock, name, experts, num_tokens)
        del experts
    if best and place.out is not None and place.dtype == torch.bfloat16:
        measured = f"{date.today().isoformat()}, torch {torch.__version__}, triton {triton.__version__}"
        write_table(place.out / TABLE, place.name, measured, {"experts": best})


def _measured(
    place: Place, clock: Clock, name: str, experts: RoutedExperts, num_tokens: int
) -> Iterator[tuple[object, object, float]]:
    """The shapes of both products with the best tiling, and the time of the layer, once rows of it are told."""
    kernels, times = kernel_set.load_experts("triton"), dict[ExpertTiling, float]()
    whole, usual_us = None, float("inf")  # of the layer with the usual tilings
    draw = torch.Generator(place.device).manual_seed(place.seed)
    for trial in expert_trials(kernels, name, experts, num_tokens, draw):
        with place.trying(trial.name):
            if place.is_dry or num_tokens in CHECKED:
                for complaint in check(trial):
                    place.complain(complaint)
            us = clock.us(trial.launch)
            place.tell({"shape": name, "name": trial.name, **row_of(place, trial, us)})
            usual_us = us if whole is None else usual_us
        whole = whole or trial
    assert whole is not None
    for tiling in place.in_time(_candidates(place, num_tokens)):
        tried = replace(experts, tilings=_only(place, experts, num_tokens, tiling))
        with place.trying(f"{whole.name}, {tiling}"):
            same = torch.Generator(place.device).manual_seed(place.seed)
            trial = next(expert_trials(kernels, name, tried, num_tokens, same))
            times[tiling] = clock.us(trial.launch)
            place.tell(
                {"shape": name, "name": f"{trial.name}, {_named(tiling)}", **row_of(place, trial, times[tiling])}
            )
    fastest = min(times, key=times.__getitem__, default=None)
    if fastest is not None and times[fastest] < usual_us:
        for shape in _shapes(experts, num_tokens, place.dtype):
            yield shape, fastest, times[fastest]


def _candidates(place: Place, num_tokens: int) -> tuple[ExpertTiling, ...]:
    if place.is_dry:
        return DRY_CANDIDATES
    return next(tilings for most, tilings in CANDIDATES.items() if num_tokens <= most)


def _only(place: Place, experts: RoutedExperts, num_tokens: int, tiling: ExpertTiling) -> Tilings:
    """A table in which both products have this tiling."""
    entries = {shape: tiling for shape in _shapes(experts, num_tokens, place.dtype)}
    return Tilings(place.name, "a candidate", {"experts": entries})


def _shapes(experts: RoutedExperts, num_tokens: int, dtype: torch.dtype) -> Iterator[ExpertShape]:
    stack = experts.stack
    assert stack is not None
    num_experts, width, inner = stack.down.shape
    sizes: dict[ExpertProduct, tuple[int, int]] = {"gate_up": (inner, width), "down": (width, inner)}
    name: Any = str(dtype).removeprefix("torch.")
    for product, (num_outputs, num_inner) in sizes.items():
        yield ExpertShape(
            num_experts=num_experts,
            num_outputs=num_outputs,
            num_inner=num_inner,
            num_pairs=num_tokens * experts.top_k,
            product=product,
            dtype=name,
        )


def _named(tiling: ExpertTiling) -> str:
    return f"{tiling.block_m} x {tiling.block_n} x {tiling.block_k}, {tiling.num_stages} stages"
