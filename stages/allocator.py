"""Turns wishes into blocks: who gets how many tokens of this step, and who loses its memory for it.

Plain code behind the allocate stage. Knows memory; refuses to know why somebody is first, and touches no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .blocks import BlockPool, BlockTables
from .messages import NO_INDICES, NO_INTS, Indices, Ints, PlanReport, Started, StepGrant, StepPlan


@dataclass(slots=True)
class _Tally:
    """What one plan is given. R rows of the plan, of which G get new blocks."""

    granted: Ints  # [R] tokens; the plan's own `num_wanted` if nothing was cut
    grows: Indices  # [G] rows
    counts: Ints  # [G] blocks for each
    num_blocks: int  # in all
    preempted: list[int] = field(default_factory=list)  # slots


class Allocator:
    """Serves one plan after another from one pool.

    Wishes are served in order: min(wanted, budget left) tokens and the blocks they need. What does not fit is left out;
    it never waits, never reorders, and preempts only in the order it was given.
    """

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, max_model_len: int) -> None:
        blocks_per_slot = -(-max_model_len // block_size)
        if num_blocks < blocks_per_slot:
            raise ValueError(
                f"num_blocks = {num_blocks}: one sequence of max_model_len = {max_model_len} tokens needs "
                f"{blocks_per_slot} blocks of {block_size}; the largest that fits is {num_blocks * block_size} tokens"
            )
        self.pool = BlockPool(num_blocks, block_size)
        self.tables = BlockTables(num_slots, blocks_per_slot, block_size)
        self.last_granted = -1  # step
        self._last_step = np.full(num_slots, -1, np.int64)  # [S] the last granted step with a row of the slot
        self.completed_step = -1
        self._started: dict[int, Started] = {}  # by slot: not yet told to the device
        self._ones = np.ones(num_slots, np.int32)
        self._nothing = np.zeros(num_slots, np.int32)  # what a plan's rows find in a prefix cache that is not there

    # -- serving a plan

    def serve(self, plan: StepPlan) -> tuple[StepGrant | None, PlanReport]:
        """The grant to run, or None if nothing of the plan can run now, and the report for whoever planned it."""
        self._take_note(plan)
        tally = self._cut_to_budget(plan)
        if tally.num_blocks > self.pool.num_free:
            tally = self._serve_under_pressure(plan)
        grant = self._grant(plan, tally)
        return grant, self._report(plan, tally, is_void=grant is None)

    def _take_note(self, plan: StepPlan) -> None:
        """What happened since the last plan: steps done, sequences ended, preempted or started."""
        self.completed_step = plan.completed_step
        self.pool.settle(plan.completed_step)
        for slot in (*plan.ended, *plan.preempted):
            self._empty(slot)
        for started in plan.started:
            self._started[started.slot] = started

    def _empty(self, slot: int) -> None:
        """Takes a slot's blocks away; they come back when the last step that was granted to it is done."""
        self._started.pop(slot, None)
        self.pool.give_back(self.tables.clear(slot), int(self._last_step[slot]), self.completed_step)

    def _cut_to_budget(self, plan: StepPlan) -> _Tally:
        """Every row's share of the token budget, and the blocks it takes if there are enough."""
        granted, num_rows = plan.num_wanted, len(plan.slots)
        if (num_rows if plan.is_decode else int(granted.sum())) > plan.token_budget:
            before = np.cumsum(plan.num_wanted, dtype=np.int32) - plan.num_wanted
            granted = np.clip(plan.token_budget - before, 0, plan.num_wanted).astype(np.int32)
            if not plan.allows_partial:
                granted[granted < plan.num_wanted] = 0
        return self._with_blocks(plan, granted)

    def _with_blocks(self, plan: StepPlan, granted: Ints) -> _Tally:
        tables, slots = self.tables, plan.slots
        lengths = tables.num_tokens[slots] + granted
        if plan.num_reserved is not None:
            lengths = np.maximum(lengths, plan.num_reserved * (granted > 0))
        num_homeless = lengths - tables.room[slots]  # tokens that the blocks do not hold yet
        grows = (num_homeless > 0).nonzero()[0]
        if plan.is_decode and plan.num_reserved is None:
            return _Tally(granted, grows, self._ones[: len(grows)], len(grows))
        counts = tables.num_blocks_for(num_homeless[grows])
        return _Tally(granted, grows, counts, int(counts.sum()))

    def _serve_under_pressure(self, plan: StepPlan) -> _Tally:
        """Row by row, when there are fewer free blocks than wished for.

        A row that lacks blocks takes them from the victims it may take from. What they give up may have to be waited
        for, and is counted before the next victim is taken. Rows behind one that waits get no new blocks: what is free
        is for the first in line.
        """
        tally = _RowByRow(np.zeros_like(plan.num_wanted), np.zeros_like(plan.num_wanted))
        row_of = {slot: row for row, slot in enumerate(plan.slots.tolist())}
        budget, num_free, is_short = plan.token_budget, self.pool.num_free, False
        for row, slot in enumerate(plan.slots.tolist()):
            if slot in tally.preempted:
                continue
            wanted = self._share(plan, row, budget)
            need = self._need(plan, row, wanted)
            while need > num_free and not is_short:
                victim = self._next_victim(plan, tally, row, need)
                if victim is None:
                    break
                budget += self._preempt(victim, row_of.get(victim), tally)
                num_free = self.pool.num_free - int(tally.new_blocks.sum())
            if need > num_free or (is_short and need > 0):
                wanted, need = (0, 0) if is_short else self._what_fits(plan, row, wanted, num_free)
                is_short = True
            tally.granted[row], tally.new_blocks[row] = wanted, need
            budget, num_free = budget - wanted, num_free - need
        grows = np.flatnonzero(tally.new_blocks)
        counts = tally.new_blocks[grows]
        return _Tally(tally.granted, grows, counts, int(counts.sum()), tally.preempted)

    def _share(self, plan: StepPlan, row: int, budget: int) -> int:
        wanted = int(plan.num_wanted[row])
        return min(wanted, budget) if plan.allows_partial or wanted <= budget else 0

    def _need(self, plan: StepPlan, row: int, granted: int) -> int:
        if granted == 0:
            return 0
        slot = plan.slots[row]
        length = max(int(self.tables.num_tokens[slot]) + granted, _reserved(plan, row))
        return max(-(-(length - int(self.tables.room[slot])) // self.tables.block_size), 0)

    def _next_victim(self, plan: StepPlan, tally: _RowByRow, row: int, need: int) -> int | None:
        """The next slot to preempt for `row`; None when waiting for quarantined blocks is enough, or nobody is left."""
        promised = self.pool.num_free + self.pool.num_quarantined - int(tally.new_blocks.sum())
        if need <= promised:
            return None
        for victim in plan.victims[: plan.num_victims[row]].tolist():
            if victim not in tally.preempted and self.tables.room[victim] > 0:
                return int(victim)
        return None

    def _preempt(self, slot: int, row: int | None, tally: _RowByRow) -> int:
        """Takes a slot's blocks, and what it was granted in this plan. Returns the tokens that frees."""
        tally.preempted.append(slot)
        self._empty(slot)
        if row is None:
            return 0
        freed = int(tally.granted[row])
        tally.granted[row] = tally.new_blocks[row] = 0
        return freed

    def _what_fits(self, plan: StepPlan, row: int, wanted: int, num_free: int) -> tuple[int, int]:
        """The part of a row's wish that `num_free` blocks can hold: (tokens, blocks)."""
        slot = plan.slots[row]
        if not plan.allows_partial or _reserved(plan, row) > 0:
            return 0, 0
        room = int(self.tables.room[slot]) + num_free * self.tables.block_size
        fits = min(wanted, room - int(self.tables.num_tokens[slot]))
        return fits, self._need(plan, row, fits)

    # -- telling

    def _grant(self, plan: StepPlan, tally: _Tally) -> StepGrant | None:
        slots, granted, is_sampled = plan.slots, tally.granted, plan.reaches_end
        if granted is not plan.num_wanted:
            rows = np.flatnonzero(granted)
            slots, granted = plan.slots[rows], tally.granted[rows]
            is_sampled = plan.reaches_end[rows] & (granted == plan.num_wanted[rows])
        if not len(slots):
            return None
        table_slots, table_places, blocks = NO_INDICES, NO_INDICES, NO_INTS
        if tally.num_blocks:
            blocks = self.pool.take(tally.num_blocks)
            table_slots, table_places = self.tables.append(plan.slots[tally.grows], tally.counts, blocks)
        starts = self.tables.num_tokens[slots]
        self.tables.num_tokens[slots] = starts + granted
        self.last_granted = plan.step
        self._last_step[slots] = plan.step
        return StepGrant(
            step=plan.step,
            generation=plan.generation,
            slots=slots,
            starts=starts,
            num_tokens=granted,
            is_sampled=is_sampled,
            table_slots=table_slots,
            table_places=table_places,
            table_blocks=blocks,
            is_decode=plan.is_decode,
            started=self._tell_started(slots) if self._started else (),
        )

    def _tell_started(self, slots: Indices) -> tuple[Started, ...]:
        return tuple(self._started.pop(slot) for slot in slots.tolist() if slot in self._started)

    def _report(self, plan: StepPlan, tally: _Tally, *, is_void: bool, is_reset: bool = False) -> PlanReport:
        return PlanReport(
            step=plan.step,
            num_granted=tally.granted,
            num_cached=self._nothing[: len(tally.granted)],
            preempted=tally.preempted,
            num_free=self.pool.num_free,
            num_quarantined=self.pool.num_quarantined,
            num_cached_blocks=self.pool.num_cached,
            is_void=is_void,
            is_reset=is_reset,
        )

    # -- after a crash

    def reset(self, plan: StepPlan) -> PlanReport:
        """Forgets every table. All blocks are free again once the steps granted so far are done."""
        self.completed_step = plan.completed_step
        self.last_granted = min(self.last_granted, plan.step - 1)  # a grant that was made was not sent
        self.tables.clear_all()
        self._started.clear()
        self.pool.seize_all(self.last_granted)
        self.pool.settle(self.completed_step)
        nothing = _Tally(np.zeros_like(plan.num_wanted), NO_INDICES, NO_INTS, 0)
        return self._report(plan, nothing, is_void=True, is_reset=True)

    def check(self) -> None:
        """Raises AssertionError unless pool and tables agree (I3, I4): each block in use is in exactly one table."""
        self.pool.check()
        held = self.tables.held()
        assert len(np.unique(held)) == len(held), "two tables hold one block"
        assert len(held) == self.pool.num_in_use, f"tables hold {len(held)} blocks, {self.pool.num_in_use} are in use"
        assert not (self.tables.room % self.tables.block_size).any(), "a table has room for a part of a block"
        assert (self.tables.num_tokens <= self.tables.room).all(), "a slot has tokens without a block"


@dataclass(slots=True)
class _RowByRow:
    """What the rows of a plan have been given so far."""

    granted: Ints  # [R] tokens
    new_blocks: Ints  # [R]
    preempted: list[int] = field(default_factory=list)  # slots


def _reserved(plan: StepPlan, row: int) -> int:
    return 0 if plan.num_reserved is None else int(plan.num_reserved[row])
