"""The part `capture`: whether a captured step holds on this card, with early launches and with a branch in its graph.

No card has run either yet. Where a graph with both fails or gives other numbers than launches one after another, it is
captured without branches, then without early launches as well. What holds first is what the parts behind it run with;
a card that is lost meanwhile leaves them neither.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from millrace.kernels import kernel_set
from millrace.kernels.triton.launch import SWITCHES, LaunchSwitches
from tests.bench.gpu.parts.card import graphed
from tests.bench.gpu.place import TINY, Place, is_device_lost, why
from tests.bench.gpu.trials.attention import AttentionLoad, Load
from tests.bench.gpu.trials.layers import EPS, Widths
from tests.bench.gpu.trials.trial import far

PART = "capture"
TRIED = (LaunchSwitches(), LaunchSwitches(branches=False), LaunchSwitches(early=False, branches=False))
NUM_LAYERS, NUM_REPLAYS = 4, 3
LOADS: tuple[Load, ...] = (
    [(1, 700), (1, 3), (1, 64), (1, 65), (1, 130)],  # one launch with its prologue
    [*[(1, 70)] * 40, (90, 516), (17, 17)],  # two lists
)
DRY_LOADS: tuple[Load, ...] = ([(1, 40), (1, 9)],)


def run(place: Place) -> None:
    """Tells a row for each try, until one holds."""
    asked = LaunchSwitches.of(os.environ)
    for switches in TRIED:
        if (switches.early and not asked.early) or (switches.branches and not asked.branches):
            continue  # the later parts run without
        try:
            found = list(wrong(place, switches))
        except Exception as error:  # an error of a capture may take the device along
            found = [why(error)]
        place.tell({"name": "captured step", **asdict(switches), "holds": not found})
        for complaint in found:
            place.complain(f"a captured step with {asdict(switches)}: {complaint}")
        if is_device_lost():
            raise RuntimeError("the device is lost")
        if not found:
            use(switches)
            return


def wrong(place: Place, switches: LaunchSwitches) -> Iterator[str]:
    """What replays of a graph give otherwise than launches in order, as lengths change between them."""
    widths = Widths.of(TINY) if place.is_dry else Widths(hidden=256, num_heads=16, num_groups=8, head_dim=128, inner=64)
    draw, kernels = torch.Generator(place.device).manual_seed(place.seed), kernel_set.load("triton")
    for load in DRY_LOADS if place.is_dry else LOADS:
        is_folded = all(new == 1 for new, _ in load)
        drawn = AttentionLoad.drawn(kernels, widths, NUM_LAYERS, load, place.dtype, draw, is_folded=is_folded)
        x = torch.randn(len(drawn.case.q), widths.hidden, generator=draw, device=place.device).to(place.dtype)
        results: list[Tensor] = []

        def step(drawn: AttentionLoad = drawn, x: Tensor = x, results: list[Tensor] = results) -> None:
            plan = drawn.plan()  # on a branch, beside the norm
            normed = kernels.rms_norm(x, None, EPS)
            results[:] = [normed, *(drawn.attend(plan)["out"] for _ in range(NUM_LAYERS))]

        use(switches)
        replay = graphed(place, step, 1)
        captured, lengths = list(results), drawn.case.lengths.clone()
        for times in range(1 if place.is_dry else NUM_REPLAYS):
            drawn.case.lengths.copy_((lengths - times).clamp(min=1) if is_folded else lengths)
            use(switches)
            replay()
            got = [result.clone() for result in (results if place.is_dry else captured)]
            use(TRIED[-1])
            step()
            for number, (mine, his) in enumerate(zip(got, results, strict=True)):
                yield from far(f"result {number} of {len(load)} sequences, replay {times}", mine, his)


def use(switches: LaunchSwitches) -> None:
    """For all launches and captures of this process from now on."""
    SWITCHES.early, SWITCHES.branches = switches.early, switches.branches


def held(rows: Iterable[Mapping[str, Any]]) -> LaunchSwitches | None:
    """What holds by the rows of a run. Neither, if the part began and found nothing that does; None: it did not run."""
    found: LaunchSwitches | None = None
    for row in rows:
        if row["part"] == PART and "began" in row:
            found = TRIED[-1]
        elif row["part"] == PART and row.get("row", {}).get("holds"):
            found = LaunchSwitches(row["row"]["early"], row["row"]["branches"])
    return found
