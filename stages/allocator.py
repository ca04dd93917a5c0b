"""Turns wishes into blocks: who gets how many tokens of this step, and who loses its memory for it.

Plain code behind the allocate stage. Knows memory; refuses to know why somebody is first, and touches no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from .blocks import BlockPool, BlockTables
from .messages import NO_INDICES, NO_INTS, Indices, Ints, PlanReport, Started, StepGrant, StepPlan
from .prefix import PrefixCache
from .sharing import Sharing


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

    With a `cache`, a sequence begins with the blocks that the cache knows for its first tokens; they are shared, never
    written to, and count as granted without being computed. One whose next block another sequence computes is left out
    until that is there.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_model_len: int,
        cache: PrefixCache | None = None,
    ) -> None:
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
        self._nothing = np.zeros(num_slots, np.int32)  # what most plans' rows find in the prefix cache
        self._sharing = None if cache is None else Sharing(cache, self.pool, self.tables)
        self._found: dict[int, Ints] = {}  # by slot: blocks that a row of the plan in hand begins with

    # -- serving a plan

    def serve(self, plan: StepPlan) -> tuple[StepGrant | None, PlanReport]:
        """The grant to run, or None if nothing of the plan can run now, and the report for whoever planned it."""
        self._take_note(plan)
        self._found.clear()
        beginners = self._beginners(plan)
        if beginners:
            return self._serve_beginners(plan, beginners)
        tally = self._cut_to_budget(plan)
        if tally.num_blocks > self.pool.num_available:
            tally = self._serve_under_pressure(plan, {})
        grant = self._grant(plan, tally)
        return grant, self._report(plan, tally, is_void=grant is None)

    def _serve_beginners(self, plan: StepPlan, beginners: dict[int, int]) -> tuple[StepGrant | None, PlanReport]:
        """A plan in which rows may find their first blocks in the cache. `beginners`: row -> tokens it wants in all."""
        plan = replace(plan, num_wanted=plan.num_wanted.copy())  # from here on: what is left to compute
        for row in beginners:
            self._attach(plan, row)
        tally = self._cut_to_budget(plan)
        tally.granted = tally.granted.copy()  # some rows may get nothing
        if tally.num_blocks > self.pool.num_available:
            for row, num_wanted in beginners.items():
                self._detach(plan, row, num_wanted)
            tally = self._serve_under_pressure(plan, beginners)
        for row, num_wanted in beginners.items():
            if not tally.granted[row]:
                self._detach(plan, row, num_wanted)
        grant = self._grant(plan, tally)
        return grant, self._report(plan, tally, is_void=grant is None)

    def _beginners(self, plan: StepPlan) -> dict[int, int]:
        if self._sharing is None or not self._started:
            return {}
        fewest = self.pool.block_size + 1  # tokens of a sequence that may find a block, and has one left to compute
        return {
            row: int(plan.num_wanted[row])
            for row, slot in enumerate(plan.slots.tolist())
            if slot in self._started and not self.tables.room[slot] and plan.num_wanted[row] >= fewest
        }

    def _attach(self, plan: StepPlan, row: int) -> None:
        """The row begins with what the cache has for it; or wants nothing yet, as somebody else computes that."""
        assert self._sharing is not None
        slot = int(plan.slots[row])
        blocks = self._sharing.find(slot)
        if blocks is None:
            plan.num_wanted[row] = 0
            return
        if len(blocks):
            self.pool.share(blocks)
            self.tables.append(np.array([slot]), np.array([len(blocks)], np.int32), blocks)
            self.tables.num_tokens[slot] = len(blocks) * self.pool.block_size
            plan.num_wanted[row] -= len(blocks) * self.pool.block_size
            self._found[slot] = blocks
        self._sharing.begin(slot, min(int(plan.num_wanted[row]), plan.token_budget))

    def _detach(self, plan: StepPlan, row: int, num_wanted: int) -> None:
        """As if the row had not been attached."""
        plan.num_wanted[row] = num_wanted
        slot = int(plan.slots[row])
        if self._sharing is not None:
            self._sharing.begin_no_more(slot)
        if self._found.pop(slot, None) is not None:
            self.pool.give_back(self.tables.clear(slot), -1, self.completed_step)

    def _take_note(self, plan: StepPlan) -> None:
        """What happened since the last plan: steps done, sequences ended, preempted or started."""
        self.completed_step = plan.completed_step
        if self._sharing is not None:
            self._sharing.settle(plan)
        self.pool.settle(plan.completed_step)
        for slot in (*plan.ended, *plan.preempted):
            self._empty(slot)
        for started in plan.started:
            self._started[started.slot] = started
            if self._sharing is not None:
                self._sharing.start(started)

    def _empty(self, slot: int) -> None:
        """Takes a slot's blocks away; they come back when the last step that was granted to it is done."""
        self._started.pop(slot, None)
        self._found.pop(slot, None)
        if self._sharing is not None:
            self._sharing.drop(slot)
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

    def _serve_under_pressure(self, plan: StepPlan, beginners: dict[int, int]) -> _Tally:
        """Row by row, when there are fewer free blocks than wished for.

        A row that lacks blocks takes them from the victims it may take from. What they give up may have to be waited
        for, and is counted before the next victim is taken. Rows of lower rank than one that waits get no new blocks:
        what is free is for the first in line, which is who may take from most others. (Decodes come before prefills of
        better rank.)
        """
        tally = _RowByRow(np.zeros_like(plan.num_wanted), np.zeros_like(plan.num_wanted))
        row_of = {slot: row for row, slot in enumerate(plan.slots.tolist())}
        budget, num_free, waiting_rank = plan.token_budget, self.pool.num_available, -1
        for row, slot in enumerate(plan.slots.tolist()):
            if slot in tally.preempted:
                continue
            if row in beginners:
                self._attach(plan, row)
                num_free = self.pool.num_available - int(tally.new_blocks.sum())
            wanted, rank = self._share(plan, row, budget), int(plan.num_victims[row])
            is_behind = rank <= waiting_rank
            need = self._need(plan, row, wanted)
            while need > num_free and not is_behind:
                victim = self._next_victim(plan, tally, row, need)
                if victim is None:
                    break
                budget += self._preempt(victim, row_of.get(victim), tally)
                num_free = self.pool.num_available - int(tally.new_blocks.sum())
            if need > num_free or (is_behind and need > 0):
                wanted, need = (0, 0) if is_behind else self._what_fits(plan, row, wanted, num_free)
                waiting_rank = max(waiting_rank, rank)
            tally.granted[row], tally.new_blocks[row] = wanted, need
            budget, num_free = budget - wanted, num_free - need
            if row in beginners and not wanted:
                self._detach(plan, row, beginners[row])
                num_free = self.pool.num_available - int(tally.new_blocks.sum())
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
        promised = self.pool.num_available + self.pool.num_quarantined - int(tally.new_blocks.sum())
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
        for slot, found in self._found.items():
            table_slots = np.concatenate([table_slots, np.full(len(found), slot)])
            table_places = np.concatenate([table_places, np.arange(len(found))])
            blocks = np.concatenate([blocks, found])
        starts = self.tables.num_tokens[slots]
        ends = starts + granted
        self.tables.num_tokens[slots] = ends
        self.last_granted = plan.step
        self._last_step[slots] = plan.step
        if self._sharing is not None and not plan.is_decode:
            self._sharing.note_grant(plan.step, slots, starts, ends, self._num_found(slots))
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
        told = [self._started.pop(slot) for slot in slots.tolist() if slot in self._started]
        if not self._found:
            return tuple(told)
        size = self.pool.block_size
        return tuple(
            replace(started, num_cached=len(self._found[started.slot]) * size)
            if started.slot in self._found
            else started
            for started in told
        )

    def _num_found(self, slots: Indices) -> Ints:
        """Tokens that rows of these slots found in the cache, now."""
        if not self._found:
            return self._nothing[: len(slots)]
        size = self.pool.block_size
        return np.array([len(self._found.get(slot, ())) * size for slot in slots.tolist()], np.int32)

    def _report(self, plan: StepPlan, tally: _Tally, *, is_void: bool, is_reset: bool = False) -> PlanReport:
        return PlanReport(
            step=plan.step,
            num_granted=tally.granted,
            num_cached=self._num_found(plan.slots),
            preempted=tally.preempted,
            num_free=self.pool.num_available,
            num_quarantined=self.pool.num_quarantined,
            is_void=is_void,
            is_reset=is_reset,
        )

    # -- the prefix cache

    @property
    def cache(self) -> PrefixCache | None:
        return None if self._sharing is None else self._sharing.cache

    def reset_prefix_cache(self) -> int:
        """Forgets what the cache knows. Returns the blocks that frees. Sequences that run keep theirs."""
        if self._sharing is None:
            return 0
        self._sharing.forget()
        return self.pool.forget_kept()

    # -- after a crash

    def reset(self, plan: StepPlan) -> PlanReport:
        """Forgets every table. All blocks are free again once the steps granted so far are done."""
        self.completed_step = plan.completed_step
        self.last_granted = min(self.last_granted, plan.step - 1)  # a grant that was made was not sent
        self.tables.clear_all()
        self._started.clear()
        self._found.clear()
        if self._sharing is not None:
            self._sharing.drop_all()
        self.pool.seize_all(self.last_granted)
        self.pool.settle(self.completed_step)
        nothing = _Tally(np.zeros_like(plan.num_wanted), NO_INDICES, NO_INTS, 0)
        return self._report(plan, nothing, is_void=True, is_reset=True)

    def check(self) -> None:
        """Raises AssertionError unless pool, tables and cache agree (I3, I4, I11): each block is in as many tables as
        the pool says, and the pool keeps what the cache knows."""
        self.pool.check()
        num_tables = np.bincount(self.tables.held(), minlength=self.pool.num_blocks)
        wrong = np.flatnonzero(num_tables != self.pool.num_tables)
        assert not len(wrong), f"blocks {wrong.tolist()} are in other tables than the pool knows of"
        if self._sharing is None:
            assert num_tables.max(initial=0) <= 1, "two tables hold one block"
        else:
            self._sharing.check()
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
