"""Times attention with other tilings than `work_lists` chooses, beside those: what its tables are set from.

    python -m tests.bench.gpu.sweeps.attention [--limit-s 100] [--json FILE] [--only NAME]... [--seed N] [--workers 14]
        [--dry]

Candidates are compiled first, by several processes, as that takes longer than all the timing. One that does not
compile, or asks for more than the device has, is named and left out. Correctness is `checks`' part of the benchmark.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from millrace.kernels import kernel_set
from millrace.kernels.layout import work_lists
from millrace.kernels.layout.work_lists import AttentionShape, Tiling
from millrace.kernels.triton import attention_plan as triton_plan
from millrace.kernels.triton.launch import capability
from tests.bench.gpu.floors import GPU_SHAPES
from tests.bench.gpu.parts.kernels import row_of
from tests.bench.gpu.place import TINY
from tests.bench.gpu.sweeps.sweeping import Sweeping, command_line, run
from tests.bench.gpu.trials.attention import FP8, timed_trials
from tests.bench.gpu.trials.layers import Widths
from tests.bench.gpu.trials.trial import Trial, far

DECODE = (
    Tiling(16, 64, 4, 3, 3),
    Tiling(16, 64, 4, 2, 3),
    Tiling(16, 64, 4, 3, 2),
    Tiling(16, 64, 4, 2, 4),
    Tiling(16, 64, 2, 2, 4),
    Tiling(16, 64, 2, 6, 3),
    Tiling(16, 64, 8, 2, 2),
    Tiling(16, 64, 8, 2, 3),
    Tiling(16, 64, 8, 6, 2),
    Tiling(16, 32, 4, 2, 4),
    Tiling(16, 32, 4, 6, 4),
    Tiling(16, 32, 2, 2, 5),
    Tiling(16, 32, 2, 6, 4),
    Tiling(16, 32, 8, 2, 3),
    Tiling(16, 128, 4, 2, 2),
    Tiling(16, 128, 8, 2, 2),
    Tiling(16, 16, 4, 3, 5),
    Tiling(16, 16, 2, 6, 6),
)
EXTEND = (
    Tiling(128, 64, 8, 3, 1),
    Tiling(128, 64, 8, 2, 1),
    Tiling(128, 128, 8, 2, 1),
    Tiling(128, 32, 8, 2, 1),
    Tiling(64, 64, 4, 2, 2),
    Tiling(64, 64, 4, 3, 2),
    Tiling(64, 32, 4, 2, 3),
    Tiling(64, 128, 8, 2, 1),
    Tiling(64, 64, 8, 2, 2),
)
TILINGS = {"decode": DECODE, "extend": EXTEND}
DRY_TILINGS = {"decode": (Tiling(16, 16, 4, 2, 2),), "extend": (Tiling(32, 16, 4, 2, 1),)}
NUM_LAYERS = 4  # of the cache, of which one is read
NUM_SHOWN = 6
SMALL = 80  # tokens of a sequence that is launched to see whether a candidate works


@dataclass(frozen=True, slots=True)
class Case:
    """One load of one model."""

    name: str
    widths: Widths
    kind: str  # decode or extend: whose tiling is varied
    load: tuple[tuple[int, int], ...]  # of each sequence: new tokens, tokens in all
    is_fp8: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Job:
    """A candidate."""

    case: Case
    tiling: Tiling

    def __str__(self) -> str:
        return f"{self.case} {tuple(self.tiling)}"

    @property
    def compiled_as(self) -> tuple[object, ...]:
        return self.case.widths, self.case.kind, self.case.is_fp8, self.tiling


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("tests.bench.gpu.sweeps.attention", "Time attention with many tilings on a GPU.")
    return run(parser, argv, sweep)


def sweep(sweeping: Sweeping) -> None:
    """Tells the times of each case."""
    place = sweeping.place
    on = place.device, place.dtype
    chosen = [case for case in cases_of(is_dry=place.is_dry) if sweeping.is_chosen(case.name)]
    candidates = {case: [Job(case, tiling) for tiling in tilings_of(case, *on, is_dry=place.is_dry)] for case in chosen}
    working = sweeping.compiled(candidates, partial(compile_one, *on))
    for case in sweeping.in_time(working):
        rows: list[dict[str, Any]] = []
        want: Tensor | None = None  # what today's tiling gives, which comes first
        for job in sweeping.in_time(working[case]):
            with sweeping.trying(job), chosen_tiling(case.kind, job.tiling):
                plan, attention = trials_of(case, *on, place.seed)
                got = attention.launch()["out"].clone()
                want = got if want is None else want
                for complaint in far(f"{job}: the result", got, want):
                    sweeping.complain(complaint)
                timed = row_of(attention, sweeping.clock.us(attention.launch))
                row = {"tiling": job.tiling, "is_today": job.tiling == today(case, *on)}
                row |= {name: timed[name] for name in ("us", "floor_us", "floor_share")}
                rows.append(row | {"plan_us": sweeping.clock.us(plan.launch)})
        show(case, rows)
        sweeping.tell({"case": case.name, "rows": rows})


def show(case: Case, rows: list[dict[str, Any]]) -> None:
    """The fastest, and today's."""
    print(f"# {case}: us, share of the floor, us of its lists")
    ranked = sorted(rows, key=lambda row: row["us"])
    for row in [*ranked[:NUM_SHOWN], *(row for row in ranked[NUM_SHOWN:] if row["is_today"])]:
        note = "  today's" if row["is_today"] else ""
        print(f"  {row['us']:8.1f}  {row['floor_share']:.3f}  {row['plan_us']:6.1f}  {tuple(row['tiling'])}{note}")
    sys.stdout.flush()


# ---- cases and candidates -------------------------------------------------------------------------------------------


def cases_of(*, is_dry: bool) -> list[Case]:
    """Decode steps of few and many sequences, and prompts."""
    if is_dry:
        widths = Widths.of(TINY)
        return [
            Case("tiny decode", widths, "decode", ((1, 40), (1, 9))),
            Case("tiny decode fp8", widths, "decode", ((1, 40), (1, 9)), True),
            Case("tiny extend", widths, "extend", ((9, 20),)),
        ]
    found = []
    for name, shape in GPU_SHAPES.items():
        widths = Widths.of(shape)
        found += [
            Case(f"{name} decode 256 x 1024", widths, "decode", ((1, 1024),) * 256),
            Case(f"{name} decode 64 x 1024", widths, "decode", ((1, 1024),) * 64),
            Case(f"{name} decode 1 x 1024", widths, "decode", ((1, 1024),)),
            Case(f"{name} decode fp8 256 x 1024", widths, "decode", ((1, 1024),) * 256, True),
            Case(f"{name} extend 1 x 8192", widths, "extend", ((8192, 8192),)),
            Case(f"{name} extend 4 x 512", widths, "extend", ((512, 512),) * 4),
        ]
    return found


def tilings_of(case: Case, device: torch.device, dtype: torch.dtype, *, is_dry: bool) -> list[Tiling]:
    """Today's first."""
    return list(dict.fromkeys([today(case, device, dtype), *(DRY_TILINGS if is_dry else TILINGS)[case.kind]]))


def today(case: Case, device: torch.device, dtype: torch.dtype) -> Tiling:
    """What `work_lists` chooses."""
    widths, cache = case.widths, FP8 if case.is_fp8 else dtype
    shape = AttentionShape(widths.num_heads, widths.num_groups, widths.head_dim, dtype, cache)
    return (work_lists.decode_tiling if case.kind == "decode" else work_lists.extend_tiling)(shape, capability(device))


def compile_one(device: torch.device, dtype: torch.dtype, job: Job) -> None:
    """Launches it once on a small load, so that Triton's cache has it."""
    small = tuple((min(new, SMALL), min(length, SMALL)) for new, length in job.case.load[:2])
    with chosen_tiling(job.case.kind, job.tiling):
        plan, attention = trials_of(replace(job.case, load=small), device, dtype, 0)
        plan.launch()
        attention.launch()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def trials_of(case: Case, device: torch.device, dtype: torch.dtype, seed: int) -> tuple[Trial, Trial]:
    """Of the lists, and of attention by them."""
    draw = torch.Generator(device).manual_seed(seed)
    kernels = kernel_set.load("triton")
    plan, attention = timed_trials(kernels, case.widths, NUM_LAYERS, case.load, dtype, draw, is_fp8=case.is_fp8)
    return plan, attention


@contextmanager
def chosen_tiling(kind: str, tiling: Tiling) -> Iterator[None]:
    """Lists are made, and launched, for this one."""
    name = f"{kind}_tiling"
    before: Any = getattr(triton_plan, name)
    setattr(triton_plan, name, lambda shape, capability: tiling)
    try:
        yield
    finally:
        setattr(triton_plan, name, before)


if __name__ == "__main__":
    raise SystemExit(main())
