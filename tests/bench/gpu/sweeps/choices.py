"""What steps are compared by: the library's products and the tables of attention, and the best that this run found."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.kernels.tilings.tables import Tilings, load_tilings
from millrace.kernels.triton.launch import num_multiprocessors
from tests.bench.gpu.place import Place
from tests.bench.gpu.sweeps.attention import TABLE


@dataclass(frozen=True, slots=True)
class Configuration:
    """Launch options. Graphs keep those that they were captured with."""

    name: str
    tilings: Tilings | None  # None: the library's products, and attention as nothing was measured


def configurations(place: Place) -> list[Configuration]:
    """`library`, and `best`: what was measured in this run, as an engine loads it, predicted where nothing was."""
    table = place.out / TABLE if place.out is not None else None
    setting = str(table) if table is not None and table.exists() else "auto"
    tilings = load_tilings(setting, place.name, num_multiprocessors(place.device))
    return [Configuration("library", None), Configuration("best", tilings)]
