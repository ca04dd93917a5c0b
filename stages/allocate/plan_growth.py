"""The new blocks of a plan: how many each row needs, of each kind, and taking them from the pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..array_checks import total
from ..messages import NO_INDICES, NO_INTS, Indices, Ints, StepPlan, TableEntries
from .tiers.block_tables import BlockTables, WindowTables
from .tiers.device_tier import DeviceTier, KindBlocks
from .tiers.plan_in_hand import PlanInHand
from .window_blocks import WindowBlocks


@dataclass(frozen=True, slots=True, eq=False)
class Growth:
    """New blocks of one kind for some rows of a plan."""

    rows: Indices  # [G]
    counts: Ints  # [G] blocks for each
    num_blocks: int  # in all
    again: Indices  # rows beside those that go on in a block that their window has passed


@dataclass(slots=True, eq=False)
class PlanAllocation:
    """The allocation for one plan: R rows, of which G get new blocks."""

    granted: Ints  # [R] tokens; the plan's `num_wanted` array itself if nothing was cut
    grows: Indices  # [G] rows
    counts: Ints  # [G] blocks for each
    num_blocks: int  # in all
    preempted: Sequence[int] = ()  # slots
    more: Sequence[Growth] = ()  # of the kinds after kind 0

    @property
    def needs(self) -> list[int]:
        """Blocks of each kind."""
        return [self.num_blocks, *(growth.num_blocks for growth in self.more)]

    @classmethod
    def of(cls, granted: Ints, new_blocks: Sequence[Ints], preempted: Sequence[int]) -> PlanAllocation:
        """`new_blocks`: of each kind, [R] for each row."""
        first, *more = (_growth(each) for each in new_blocks)
        return cls(granted, first.rows, first.counts, first.num_blocks, preempted, more)


class PlanGrowth:
    """The new blocks of one plan after another."""

    def __init__(self, num_slots: int, device: DeviceTier, windows: WindowBlocks) -> None:
        self._device, self._windows = device, windows
        self._ones = np.ones(num_slots, np.int32)

    # -- how many

    def needed(self, plan: StepPlan, granted: Ints, last_granted: int) -> PlanAllocation:
        """The blocks that all rows need, whether or not the pools have them. `last_granted`: number of that step."""
        tables, slots, others = self._device.tables, plan.slots, self._device.more
        lengths = tables.num_tokens[slots] + granted
        num_in_flight = last_granted - plan.completed_step
        more = [self._growth_to(each, plan, granted, lengths, num_in_flight) for each in others] if others else ()
        if plan.num_reserved is not None:
            lengths = _with_reserved(tables, plan, granted, lengths)
        num_beyond = lengths - tables.capacity[slots]  # tokens beyond the capacity of the slot's blocks
        grows = (num_beyond > 0).nonzero()[0]
        if plan.is_decode and plan.num_reserved is None:
            return PlanAllocation(granted, grows, self._ones[: len(grows)], len(grows), (), more)
        counts = tables.num_blocks_for(num_beyond[grows])
        return PlanAllocation(granted, grows, counts, total(counts), (), more)

    def _growth_to(self, each: KindBlocks, plan: StepPlan, granted: Ints, lengths: Ints, num_in_flight: int) -> Growth:
        """The blocks that the tables of a kind need for these lengths, [R], of the rows of a plan."""
        tables, again = each.tables, NO_INDICES
        if plan.num_reserved is not None:
            lengths = _with_reserved(tables, plan, granted, lengths)
        num_beyond = lengths - tables.capacity[plan.slots]
        rows = (num_beyond > 0).nonzero()[0]
        if isinstance(tables, WindowTables) and len(rows) and self._windows.keeps_passed(plan):
            goes_on = (granted[rows] == 1) & self._windows.may_go_on(each, plan.slots[rows], num_in_flight)
            rows, again = rows[~goes_on], rows[goes_on]
        counts = tables.num_blocks_for(num_beyond[rows])
        return Growth(rows, counts, int(counts.sum()), again)

    def fits(self, allocation: PlanAllocation) -> bool:
        """Whether the pools have the blocks."""
        if not self._device.more:
            return allocation.num_blocks <= self._device.pool.num_available
        return self._device.fits(allocation.needs)

    # -- taking them

    def take(
        self, hand: PlanInHand, allocation: PlanAllocation
    ) -> tuple[Indices, Indices, Ints, tuple[TableEntries, ...]]:
        """Takes the blocks of an allocation that fits.

        Returns (slot, place, block) of each of kind 0 and of the shared blocks with which sequences start; and the same
        of the other kinds.
        """
        slots, places, blocks = NO_INDICES, NO_INDICES, NO_INTS
        more: tuple[TableEntries, ...] = ()
        if self._device.more:
            self._device.reserve(allocation.needs, hand)
            more = self._take_more(hand, allocation.more)
        if allocation.num_blocks or hand.begun:
            slots, places, blocks = self._take_first(hand, allocation)
        if self._device.more:
            self._device.give_back_unused()
        return slots, places, blocks, more

    def _take_first(self, hand: PlanInHand, allocation: PlanAllocation) -> tuple[Indices, Indices, Ints]:
        """The blocks of kind 0."""
        pool, tables, counts = self._device.pool, self._device.tables, allocation.counts
        slots = hand.plan.slots[allocation.grows]
        blocks = pool.take_behind(tables.last_blocks(slots), counts.tolist(), allocation.num_blocks, hand)
        table_slots, table_places = tables.append(slots, counts, blocks)
        for slot, beginning in hand.begun.items():
            found = beginning.shared
            table_slots = np.concatenate([table_slots, np.full(len(found), slot)])
            table_places = np.concatenate([table_places, np.arange(len(found))])
            blocks = np.concatenate([blocks, found])
        return table_slots, table_places, blocks

    def _take_more(self, hand: PlanInHand, growths: Sequence[Growth]) -> tuple[TableEntries, ...]:
        """The blocks of the kinds after kind 0."""
        made = []
        for each, growth in zip(self._device.more, growths, strict=True):
            slots, places, blocks = NO_INDICES, NO_INDICES, NO_INTS
            if growth.num_blocks:
                slots = hand.plan.slots[growth.rows]
                last_blocks = each.tables.last_blocks(slots)
                blocks = each.pool.take_behind(last_blocks, growth.counts.tolist(), growth.num_blocks, hand)
                slots, places = each.tables.append(slots, growth.counts, blocks)
            if len(growth.again):
                own_slots, own_places, own_blocks = self._windows.go_on(each, hand.plan.slots[growth.again])
                slots, places = np.concatenate([slots, own_slots]), np.concatenate([places, own_places])
                blocks = np.concatenate([blocks, own_blocks])
            for slot, beginning in hand.begun.items():
                first, found, _, _ = beginning.more[each.kind - 1]
                slots = np.concatenate([slots, np.full(len(found), slot)])
                places = np.concatenate([places, np.arange(first, first + len(found))])
                blocks = np.concatenate([blocks, found])
            if len(slots):
                made.append(TableEntries(each.kind, slots, places, blocks))
        return tuple(made)


def _with_reserved(tables: BlockTables, plan: StepPlan, granted: Ints, lengths: Ints) -> Ints:
    """`lengths`, or what rows reserve if that is more."""
    assert plan.num_reserved is not None
    reserved: Ints = np.maximum(lengths, tables.reservable(plan.slots, plan.num_reserved) * (granted > 0))
    return reserved


def _growth(new_blocks: Ints) -> Growth:
    """`new_blocks`, [R] for each row, as growth."""
    rows = new_blocks.nonzero()[0]
    counts = new_blocks[rows]
    return Growth(rows, counts, int(counts.sum()), NO_INDICES)
