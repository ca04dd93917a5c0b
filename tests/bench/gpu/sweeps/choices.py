"""Configurations that steps are compared by: what is shipped, and the best that this run has found so far."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from millrace.kernels.layout.work_lists import Tiling
from tests.bench.gpu.place import Place
from tests.bench.gpu.sweeps.attention import Choice, chosen
from tests.bench.gpu.timed_run.rows import read_rows

DECISIVE = {"decode": "decode 256 x 1024", "extend": "extend 1 x 8192"}  # the loads whose best is taken for all


@dataclass(frozen=True, slots=True)
class Configuration:
    """Launch options, by the kind of attention. Graphs keep those that they were captured with."""

    name: str
    attention: dict[str, Choice]

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, choice in self.attention.items():
                stack.enter_context(chosen(kind, choice))
            yield


def configurations(place: Place) -> list[Configuration]:
    """What is shipped, and `best` where the sweeps of this run have found something else."""
    rows = read_rows(place.out) if place.out is not None else []
    best = best_choices([row["row"] for row in rows if row["part"] == "attention" and "row" in row])
    found = [Configuration("shipped", {})]
    if best or place.is_dry:
        found.append(Configuration("best", best))
    return found


def best_choices(rows: list[dict[str, Any]]) -> dict[str, Choice]:
    """Of each kind whose decisive load was faster with another tiling."""
    found: dict[str, Choice] = {}
    for row in rows:
        kind = row.get("kind")
        if kind in DECISIVE and row["name"].endswith(DECISIVE[kind]) and row["us"] < row["shipped_us"]:
            found[kind] = Choice(Tiling(*row["tiling"]), row["min_tiles"])
    return found
