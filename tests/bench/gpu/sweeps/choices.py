"""What steps are compared by: the library's products and the tables' tilings, and the best that this run found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from millrace.kernels.layout.work_lists import Tiling
from millrace.kernels.tilings.tables import Tilings, load_tilings
from millrace.kernels.triton.launch import num_multiprocessors
from tests.bench.gpu.place import Place
from tests.bench.gpu.sweeps.attention import Choice, chosen
from tests.bench.gpu.sweeps.products import TABLE
from tests.bench.gpu.timed_run.rows import read_rows

DECISIVE = {"decode": "decode 256 x 1024", "extend": "extend 1 x 8192"}  # the loads whose best is taken for all


@dataclass(frozen=True, slots=True)
class Configuration:
    """Launch options, of attention by its kind. Graphs keep those that they were captured with."""

    name: str
    attention: dict[str, Choice]
    tilings: Tilings | None  # of products; None: the library's

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, choice in self.attention.items():
                stack.enter_context(chosen(kind, choice))
            yield


def configurations(place: Place) -> list[Configuration]:
    """`library`, and `best`: the forms of products that were measured in this run, predicted where none was, and the
    tilings of attention that were faster than the tables'."""
    rows = read_rows(place.out) if place.out is not None else []
    best = best_choices([row["row"] for row in rows if row["part"] == "attention" and "row" in row])
    table = place.out / TABLE if place.out is not None else None
    setting = str(table) if table is not None and table.exists() else "auto"
    tilings = load_tilings(setting, place.name, num_multiprocessors(place.device))
    return [Configuration("library", {}, None), Configuration("best", best, tilings)]


def best_choices(rows: list[dict[str, Any]]) -> dict[str, Choice]:
    """Of each kind whose decisive load was faster with another tiling."""
    found: dict[str, Choice] = {}
    for row in rows:
        kind = row.get("kind")
        if kind in DECISIVE and row["name"].endswith(DECISIVE[kind]) and row["us"] < row["shipped_us"]:
            found[kind] = Choice(Tiling(*row["tiling"]), row["min_tiles"])
    return found
