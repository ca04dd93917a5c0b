"""The part `attention`: each load with other tilings than the tables choose, beside those, and beside other libraries.

A load's tensors are made once, for all its candidates. What today's tiling gives is what the others are held against:
the part `correct` has held that against float64. Candidates were compiled beforehand, see `ahead.py`; one that asks for
more than the device has is named and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from itertools import product
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from millrace.kernels import kernel_set
from millrace.kernels.layout import work_lists
from millrace.kernels.layout.work_lists import AttentionShape, Tiling
from millrace.kernels.tilings.attention import CacheName, StepShape, StepTiling
from millrace.kernels.tilings.tables import write_table
from millrace.kernels.triton import attention_plan as triton_plan
from millrace.kernels.triton.attention import MOST_FOLDED_ROWS
from millrace.kernels.triton.launch import capability
from tests.bench.gpu.floors import GPU_SHAPES
from tests.bench.gpu.place import TINY, Place
from tests.bench.gpu.trials.attention import FP8, AttentionLoad
from tests.bench.gpu.trials.layers import Widths
from tests.bench.gpu.trials.timing import clock_of
from tests.bench.gpu.trials.trial import far

TABLE, TABLE_BLOCK = "tilings.json", 16  # tokens of a block, in cases that go into the table
NUM_LAYERS = 4  # of the cache, of which one is read
LEAST_S = 1.0  # a load takes, with its candidates
SMALL = 80  # tokens of a sequence that is compiled for: more change nothing


@dataclass(frozen=True, slots=True)
class Choice:
    """How a kernel is launched."""

    tiling: Tiling
    min_tiles: int | None = None  # of a program's stretch; None: as `divide` chooses

    @property
    def whole(self) -> Tiling:
        return self.tiling._replace(min_tiles=self.min_tiles)

    def __str__(self) -> str:
        return f"{self.tiling[:5]}" + f" from {self.min_tiles} tiles" * (self.min_tiles is not None)


# Today's come first, then those whose loops wait for each load, as all did before they ran ahead: 2 stages.
DECODE = (
    Choice(Tiling(16, 64, 4, 2, 3)),
    *(Choice(Tiling(16, *each)) for each in product((64,), (4,), (3, 4), (2, 3, 4))),
    *(Choice(Tiling(16, *each)) for each in product((32,), (4,), (3, 4), (3, 4))),
    *(Choice(Tiling(16, *each)) for each in product((128,), (4, 8), (3,), (1, 2))),
    Choice(Tiling(16, 64, 2, 3, 3)),
    Choice(Tiling(16, 64, 8, 3, 2)),
)
EXTEND = (
    Choice(Tiling(128, 64, 8, 2, 1)),
    *(Choice(Tiling(128, *each)) for each in product((64, 128), (8,), (3, 4), (1,))),
    *(Choice(Tiling(64, *each)) for each in product((64,), (4,), (3, 4), (1, 2))),
    Choice(Tiling(64, 128, 8, 3, 1)),
)
CHOICES = {"decode": DECODE, "extend": EXTEND}
DRY_CHOICES = {"decode": (Choice(Tiling(16, 16, 4, 2, 2), 1),), "extend": (Choice(Tiling(32, 16, 4, 2, 1)),)}


@dataclass(frozen=True, slots=True)
class Case:
    """One load of one model."""

    name: str
    widths: Widths
    kind: str  # decode or extend: whose tiling is varied
    load: tuple[tuple[int, int], ...]  # of each sequence: new tokens, tokens in all
    is_fp8: bool = False
    block_size: int = 16
    min_tiles: tuple[int, ...] = ()  # tried with today's tiling

    @property
    def is_folded(self) -> bool:
        """Whether a step has this in one launch with its prologue, so that this is what must be fast."""
        return self.kind == "decode" and len(self.load) <= MOST_FOLDED_ROWS

    def __str__(self) -> str:
        return self.name


Best = dict[str, dict[StepShape, tuple[StepTiling, float]]]


def run(place: Place) -> None:
    """Tells a row for each candidate, one for the best, which goes into the table, and those of other libraries."""
    best: Best = {"decode": {}, "extend": {}}
    for case in place.in_time(cases_of(place), LEAST_S):
        with place.trying(case):
            found = sweep(place, case)
            if found is not None and case.block_size == TABLE_BLOCK:
                best[case.kind].setdefault(step_of(case), found)  # what decides most comes first
                tabulate(place, best)


def step_of(case: Case) -> StepShape:
    """The shape in a table."""
    widths, num_rows = case.widths, sum(num_new for num_new, _ in case.load)
    cache: CacheName = "float8_e4m3fn" if case.is_fp8 else "bfloat16"
    group = widths.num_heads // widths.num_groups
    return StepShape(group=group, head_dim=widths.head_dim, num_rows=num_rows, cache_dtype=cache)


def tabulate(place: Place, best: Best) -> None:
    """The table is whole after each case."""
    if place.out is not None and place.dtype == torch.bfloat16:
        measured = f"{date.today().isoformat()}, torch {torch.__version__}, triton {triton.__version__}"
        entries = {kind: [(shape, *each) for shape, each in found.items()] for kind, found in best.items()}
        write_table(place.out / TABLE, place.name, measured, entries)


def sweep(place: Place, case: Case) -> tuple[StepTiling, float] | None:
    """One load: its best tiling, with its time."""
    clock = clock_of(place.device)
    draw = torch.Generator(place.device).manual_seed(place.seed)
    kinds = {"is_fp8": case.is_fp8, "block_size": case.block_size, "is_folded": case.is_folded}
    kernels = kernel_set.load("triton")
    load = AttentionLoad.drawn(kernels, case.widths, NUM_LAYERS, case.load, place.dtype, draw, **kinds)
    want: Tensor | None = None  # what today's gives, which comes first
    found: list[tuple[float, Choice, float]] = []
    for choice in place.in_time(choices_of(case, place.device, place.dtype, is_dry=place.is_dry)):
        name = f"{case} {choice}"
        with place.trying(name), chosen(case.kind, choice):
            plan, attention = load.trials()
            got = attention.launch()["out"].clone()
            want = got if want is None else want
            if complaints := list(far(f"{name}: the result", got, want)):
                place.complain(complaints[0])
                continue
            us, plan_us = clock.us(attention.launch), clock.us(plan.launch)
            floor_us = 1e6 * attention.cost.floor_s(place.card.bytes_per_s, place.card.flops_per_s)
            found.append((us, choice, floor_us))
            place.tell({"name": name, "us": us, "floor_us": floor_us, "plan_us": plan_us, "is_shown": False})
    if not found:
        return None
    shipped_us = found[0][0]
    us, choice, floor_us = min(found, key=lambda each: each[0])
    best = {"kind": case.kind, "tiling": choice.tiling[:5], "min_tiles": choice.min_tiles}
    place.tell({"name": case.name, "us": us, "floor_us": floor_us, "shipped_us": shipped_us, **best})
    for name, launch in others(case, load, place):
        with place.trying(f"{case} {name}"):
            place.tell({"name": f"{case} {name}", "us": clock.us(launch), "floor_us": floor_us})
    return StepTiling(**choice.whole._asdict()), us


def others(case: Case, load: AttentionLoad, place: Place) -> Iterator[tuple[str, Callable[[], dict[str, Tensor]]]]:
    """Of one whole prompt: PyTorch's own kernels, over keys that lie one after another."""
    if len(case.load) > 1 or case.load[0][0] != case.load[0][1] or case.is_fp8:
        return
    (num_tokens, _), widths = case.load[0], case.widths
    q = load.case.q.transpose(0, 1)[None]
    keys = torch.randn(1, widths.num_groups, num_tokens, widths.head_dim, device=q.device).to(q.dtype)
    backends = (SDPBackend.MATH,) if place.is_dry else (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
    for backend in backends:

        def launch(backend: SDPBackend = backend) -> dict[str, Tensor]:
            with sdpa_kernel(backend):
                return {"out": scaled_dot_product_attention(q, keys, keys, is_causal=True, enable_gqa=True)}

        yield f"by {backend.name.lower()}", launch


# ---- loads and candidates -------------------------------------------------------------------------------------------


def cases_of(place: Place | None) -> list[Case]:
    """Those that decide most come first. None: of a GPU with everything, as they are compiled."""
    if place is not None and place.is_dry:
        widths = Widths.of(TINY)
        cases = [
            Case("tiny decode", widths, "decode", ((1, 40), (1, 9))),
            Case("tiny decode fp8", widths, "decode", ((1, 40), (1, 9)), True),
            Case("tiny extend", widths, "extend", ((9, 9),)),
        ]
    else:
        small, large = (Widths.of(GPU_SHAPES[name]) for name in ("qwen3-0.6b", "llama-3.1-8b"))
        few = (1, 2, 4)
        cases = [
            Case("qwen3-0.6b decode 256 x 1024", small, "decode", ((1, 1024),) * 256),
            Case("qwen3-0.6b extend 1 x 8192", small, "extend", ((8192, 8192),)),
            Case("qwen3-0.6b decode 1 x 1024", small, "decode", ((1, 1024),), min_tiles=few),
            Case("qwen3-0.6b decode 64 x 1024", small, "decode", ((1, 1024),) * 64, min_tiles=few),
            Case("qwen3-0.6b decode fp8 256 x 1024", small, "decode", ((1, 1024),) * 256, True),
            Case("qwen3-0.6b extend 1 x 2048", small, "extend", ((2048, 2048),)),
            Case("llama-3.1-8b decode 256 x 1024", large, "decode", ((1, 1024),) * 256),
            Case("qwen3-0.6b decode 64 x 8192", small, "decode", ((1, 8192),) * 64),
            Case("qwen3-0.6b decode 8 x 1024", small, "decode", ((1, 1024),) * 8, min_tiles=few),
            Case("llama-3.1-8b extend 1 x 8192", large, "extend", ((8192, 8192),)),
            Case("qwen3-0.6b extend 4 x 512", small, "extend", ((512, 512),) * 4),
            Case("qwen3-0.6b extend 16 x 512 + 240", small, "extend", ((1, 1024),) * 240 + ((512, 512),) * 16),
            Case("qwen3-0.6b decode 256 x 1024, blocks of 64", small, "decode", ((1, 1024),) * 256, block_size=64),
            Case("llama-3.1-8b decode 1 x 1024", large, "decode", ((1, 1024),), min_tiles=few),
        ]
    if place is None:
        return cases
    can_fp8 = place.is_dry or place.has_fp8
    return [case for case in cases if place.is_chosen(case.name) and (can_fp8 or not case.is_fp8)]


def choices_of(case: Case, device: torch.device, dtype: torch.dtype, *, is_dry: bool) -> list[Choice]:
    """Today's first."""
    tiling = today(case, device, dtype)
    found = [Choice(tiling), *(DRY_CHOICES if is_dry else CHOICES)[case.kind]]
    return list(dict.fromkeys([*found, *(Choice(tiling, min_tiles) for min_tiles in case.min_tiles)]))


def today(case: Case, device: torch.device, dtype: torch.dtype) -> Tiling:
    """What the tables choose."""
    widths, cache = case.widths, FP8 if case.is_fp8 else dtype
    shape = AttentionShape(widths.num_heads, widths.num_groups, widths.head_dim, dtype, cache)
    return (work_lists.decode_tiling if case.kind == "decode" else work_lists.extend_tiling)(shape, capability(device))


def compile_choice(case: Case, choice: Choice) -> None:
    """Launches it on meta tensors, for the processes that compile."""
    from millrace.kernels.triton import kernel_set as triton_kernels

    is_whole, is_folded = len(case.load) == 1, case.is_folded
    small = tuple((min(new, SMALL), min(length, SMALL)) for new, length in case.load[:: max(1, len(case.load) - 1)])
    case = replace(case, load=small[: 1 if is_whole else 2])
    sizes: dict[str, Any] = {"is_fp8": case.is_fp8, "block_size": case.block_size, "is_folded": is_folded}
    sizes["device"] = torch.device("meta")
    load = AttentionLoad.drawn(triton_kernels, case.widths, NUM_LAYERS, case.load, torch.bfloat16, None, **sizes)
    with chosen(case.kind, choice):
        load.attend(load.plan())


@contextmanager
def chosen(kind: str, choice: Choice) -> Iterator[None]:
    """Lists are made, and walked, by this."""
    name = f"{kind}_tiling"
    before = getattr(triton_plan, name)
    setattr(triton_plan, name, lambda *_: choice.whole)
    try:
        yield
    finally:
        setattr(triton_plan, name, before)
