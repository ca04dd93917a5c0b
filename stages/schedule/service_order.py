"""The order in which running sequences are served, who may lose its blocks for whom, and what a plan asks for them.

Plain, columnar state behind the schedule stage; made anew when somebody comes or goes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..messages import Bools, Indices, Ints
from .slot_table import SlotTable


@dataclass(frozen=True, slots=True, eq=False)
class Lineup:
    """The slots that are served, in order, and the victims: parked ones, then who is served last."""

    slots: Indices  # [R]
    victims: Indices  # [V] first to go first
    num_victims: Ints  # [S] by slot: how many of them, from the front, it may take
    has_reserves: bool  # whether any row is to have all its blocks at once

    @classmethod
    def of(cls, table: SlotTable) -> Lineup:
        slots = table.served()
        parked = (table.is_running & table.is_parked).nonzero()[0]
        is_victim = table.reserve[slots] == 0
        is_victim[:1] = False  # the first in line is never preempted
        behind = np.cumsum(is_victim[::-1])[::-1] - is_victim
        num_victims = np.zeros(table.num_slots, np.int32)
        num_victims[slots] = behind + len(parked)
        victims = np.concatenate([parked, slots[is_victim][::-1]])
        return cls(slots, victims, num_victims, bool(np.count_nonzero(table.reserve[slots])))


@dataclass(slots=True, eq=False)
class Wishes:
    """What a plan asks for, row by row: the columns of `StepPlan` of these names."""

    slots: Indices  # [R]
    num_wanted: Ints  # [R] drafts not counted
    reaches_end: Bools  # [R] all true
    victims: Indices  # [V]
    num_victims: Ints  # [R]
    num_reserved: Ints | None  # [R]

    @classmethod
    def of(cls, lineup: Lineup, table: SlotTable, slots: Indices, num_wanted: Ints) -> Wishes:
        return cls(*_columns(lineup, table, slots, num_wanted))


@dataclass(slots=True, eq=False)
class Steady(Wishes):
    """What a plan of decoding rows asks for, again and again, until a row comes or goes: each row wants one token."""

    lineup: Lineup  # it holds for
    one_each: Ints  # [S] by slot: ones for the rows, zeros elsewhere
    num_plans: int  # for which it still holds: the fewest tokens that any row may yet make
    num_context: int  # tokens that the rows of the next plan attend to

    @classmethod
    def begin(cls, lineup: Lineup, table: SlotTable, ones: Ints) -> Steady:
        """Of all rows of a lineup, each of which wants `ones` of them, [R]."""
        slots = lineup.slots
        one_each = np.zeros(table.num_slots, np.int32)
        one_each[slots] = 1
        return cls(
            *_columns(lineup, table, slots, ones),
            lineup=lineup,
            one_each=one_each,
            num_plans=int((table.limit[slots] - table.num_known[slots]).min()),
            num_context=int(table.num_known[slots].sum()),
        )

    def note_granted(self, table: SlotTable) -> None:
        """All rows got their token."""
        table.num_computed += self.one_each
        table.num_known += self.one_each
        self.num_plans -= 1
        self.num_context += len(self.slots)


def _columns(
    lineup: Lineup, table: SlotTable, slots: Indices, num_wanted: Ints
) -> tuple[Indices, Ints, Bools, Indices, Ints, Ints | None]:
    """Those of `Wishes`, in their order."""
    num_reserved = table.reserve[slots] if lineup.has_reserves else None
    return slots, num_wanted, np.ones(len(slots), np.bool_), lineup.victims, lineup.num_victims[slots], num_reserved
