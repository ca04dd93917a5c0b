"""Turns wishes into blocks: who gets how many tokens of this step, and who loses its memory for it.

Plain code behind the allocate stage. Knows memory; refuses to know why somebody is first, and touches no tensor. The
books are in `slot_blocks.py`; what happens when memory is short, in `preemption.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..messages import NO_INDICES, NO_INTS, Indices, Ints, PlanReport, Rates, StepGrant, StepPlan
from .host_tier import HostTier
from .preemption import Pressure
from .prefix_cache import PrefixCache
from .slot_blocks import Holdings
from .steady_decode import Stride


@dataclass(frozen=True, slots=True)
class _Tally:
    """What one plan is given. R rows of the plan, of which G get new blocks."""

    granted: Ints  # [R] tokens; the plan's own `num_wanted` if nothing was cut
    grows: Indices  # [G] rows
    counts: Ints  # [G] blocks for each
    num_blocks: int  # in all
    preempted: Sequence[int] = ()  # slots


class Allocator:
    """Serves one plan after another from one pool.

    Wishes are served in order: min(wanted, budget left) tokens and the blocks they need. What does not fit is left out;
    it never waits, never reorders, and preempts only in the order it was given.

    With a `cache`, a sequence begins with the blocks that the cache knows for its first tokens; they are shared, never
    written to, and count as granted without being computed. So do the first tokens of a block that goes on differently:
    the sequence gets a copy of that one. One whose next block another sequence computes is left out until that is
    there. With a `host`, what a victim has computed is copied there while there is room, and copied back
    when it is served again. Drafts get blocks like any tokens, and count as computed once schedule says that they were
    accepted.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_model_len: int,
        cache: PrefixCache | None = None,
        host: HostTier | None = None,
    ) -> None:
        blocks_per_slot = -(-max_model_len // block_size)
        if num_blocks < blocks_per_slot:
            raise ValueError(
                f"num_blocks = {num_blocks}: one sequence of max_model_len = {max_model_len} tokens needs "
                f"{blocks_per_slot} blocks of {block_size}; the largest that fits is {num_blocks * block_size} tokens"
            )
        self.last_granted = -1  # step
        self._holdings = Holdings(num_blocks, block_size, num_slots, blocks_per_slot, cache, host)
        self.pool, self.tables = self._holdings.pool, self._holdings.tables  # to be looked at
        self._ones = np.ones(num_slots, np.int32)
        self._nothing = np.zeros(num_slots, np.int32)  # what most plans' rows begin with
        self._stride: Stride | None = None  # of the last plan's rows, if there were two of the same that only decode
        self._last_slots: Indices | None = None  # of the last plan, if its rows only decode

    # -- looking at it

    @property
    def sequence_ids(self) -> NDArray[np.int64]:
        """[S] whose blocks a slot holds, or held last; -1 for nobody's yet."""
        return self._holdings.sequence_ids

    @property
    def host(self) -> HostTier | None:
        """What is swapped out; None if nothing ever is."""
        return self._holdings.host

    @property
    def cache(self) -> PrefixCache | None:
        """What is known of earlier sequences; None if it is off."""
        sharing = self._holdings.sharing
        return None if sharing is None else sharing.cache

    def use_rates(self, rates: Rates) -> None:
        """From now on swapping is weighed against computing again with these."""
        if self.host is not None:
            self.host.rates = rates

    def reset_prefix_cache(self) -> int:
        """Forgets what the cache knows. Returns the blocks that frees. Sequences that run keep theirs."""
        if self._holdings.sharing is None:
            return 0
        self._holdings.sharing.forget()
        if self.host is not None:
            self.host.reset()
        return self.pool.forget_kept()

    def check(self) -> None:
        """Raises AssertionError unless pools, tables and cache agree (I3, I4, I11)."""
        self._holdings.check()

    # -- serving a plan

    def serve(self, plan: StepPlan) -> tuple[StepGrant | None, PlanReport]:
        """The grant to run, or None if nothing of the plan can run now and there is nothing to copy; and the report for
        whoever planned it."""
        holdings = self._holdings
        holdings.take_note(plan)
        stride = self._stride_of(plan)
        if stride is not None:
            return self._go_on(plan, stride)
        beginners = holdings.beginners(plan)
        if beginners:
            plan = replace(plan, num_wanted=plan.num_wanted.copy())  # from here on: what is left to compute
            for row in beginners:
                holdings.attach(plan, row, may_fork=True)
        granted = _cut_to_budget(plan)
        if beginners:
            granted = granted.copy()  # some rows may get nothing
            self._detach_idle(plan, beginners, granted)
        tally = self._with_blocks(plan, granted)
        if tally.num_blocks > self.pool.num_available:
            for row, num_wanted in beginners.items():
                holdings.detach(plan, row, num_wanted)
            plan = _without_drafts(plan)  # nobody loses anything, or waits, for the sake of a guess
            pressure = Pressure(holdings, plan, beginners)
            pressure.serve()
            grows = pressure.new_blocks.nonzero()[0]
            counts = pressure.new_blocks[grows]
            tally = _Tally(pressure.granted, grows, counts, int(counts.sum()), pressure.preempted)
        grant = self._grant(plan, tally)
        return grant, self._report(plan, tally.granted, tally.preempted, is_void=grant is None)

    # -- rows that go on as they are

    def _stride_of(self, plan: StepPlan) -> Stride | None:
        """What is known ahead of the plan's rows, if they are the last plan's, and there is all that they need."""
        is_same = plan.is_decode and plan.slots is self._last_slots
        self._last_slots = plan.slots if plan.is_decode and plan.num_reserved is None else None
        if not is_same or self._last_slots is None or self._holdings.started or len(plan.slots) > plan.token_budget:
            self._stride = None
            return None
        if self._stride is None:
            self._stride = Stride(plan.slots, self.tables)
        if not self._stride.is_whole or self._stride.num_blocks > self.pool.num_available:
            self._stride = self._last_slots = None
        return self._stride

    def _go_on(self, plan: StepPlan, stride: Stride) -> tuple[StepGrant, PlanReport]:
        table_slots, table_places, blocks = NO_INDICES, NO_INDICES, NO_INTS
        if stride.num_blocks:
            blocks = self.pool.take_behind(stride.lasts(), [1] * stride.num_blocks, stride.num_blocks)
            table_slots, table_places = stride.grow(blocks)
        starts = stride.step()
        self.last_granted = plan.step
        self._holdings.last_step[plan.slots] = plan.step
        grant = StepGrant(
            step=plan.step,
            generation=plan.generation,
            slots=plan.slots,
            starts=starts,
            num_tokens=plan.num_wanted,
            is_sampled=plan.reaches_end,
            table_slots=table_slots,
            table_places=table_places,
            table_blocks=blocks,
            is_decode=True,
            copies=tuple(self._holdings.copies),
        )
        return grant, self._report(plan, plan.num_wanted, ())

    # -- any others

    def _detach_idle(self, plan: StepPlan, beginners: dict[int, int], granted: Ints) -> None:
        for row, num_wanted in beginners.items():
            if not granted[row]:
                self._holdings.detach(plan, row, num_wanted)

    def _with_blocks(self, plan: StepPlan, granted: Ints) -> _Tally:
        """The blocks that all rows take, if there are enough."""
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

    # -- telling

    def _grant(self, plan: StepPlan, tally: _Tally) -> StepGrant | None:
        holdings, tables = self._holdings, self.tables
        slots, granted, is_sampled, drafts = plan.slots, tally.granted, plan.reaches_end, plan.drafts
        if granted is not plan.num_wanted:
            rows = granted.nonzero()[0]
            slots, granted = plan.slots[rows], tally.granted[rows]
            is_sampled = plan.reaches_end[rows] & (granted == plan.num_wanted[rows])
            drafts = None if drafts is None else drafts.take(rows)
        if not len(slots) and not holdings.copies:
            return None
        table_slots, table_places, blocks = NO_INDICES, NO_INDICES, NO_INTS
        if tally.num_blocks or holdings.begun:
            table_slots, table_places, blocks = holdings.grow(plan.slots[tally.grows], tally.counts, tally.num_blocks)
        starts = tables.num_tokens[slots]
        ends = starts + granted
        tables.num_tokens[slots] = ends if drafts is None else ends - drafts.counts
        self.last_granted = plan.step
        holdings.last_step[slots] = plan.step
        if holdings.begun:
            holdings.fork(plan.step)
            holdings.copy_in(plan.step)
        if holdings.sharing is not None and not plan.is_decode:
            holdings.sharing.note_grant(plan.step, slots, starts, ends, self._num_begun(slots))
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
            drafts=drafts,
            started=holdings.tell_started(slots) if holdings.started else (),
            copies=tuple(holdings.copies),
        )

    def _num_begun(self, slots: Indices) -> Ints:
        """Tokens that rows of these slots begin with, now."""
        begun = self._holdings.begun
        if not begun:
            return self._nothing[: len(slots)]
        return np.array([begun[slot].num_tokens if slot in begun else 0 for slot in slots.tolist()], np.int32)

    def _report(
        self, plan: StepPlan, granted: Ints, preempted: Sequence[int], *, is_void: bool = False, is_reset: bool = False
    ) -> PlanReport:
        holdings = self._holdings
        pool, host = holdings.pool, holdings.host
        return PlanReport(
            step=plan.step,
            num_granted=granted,
            num_cached=self._num_begun(plan.slots),
            preempted=preempted,
            num_free=pool.num_available,
            num_quarantined=pool.num_quarantined,
            num_host_free=0 if host is None else host.pool.num_available,
            num_host_quarantined=0 if host is None else host.pool.num_quarantined,
            swapped=holdings.swapped,
            is_void=is_void,
            is_reset=is_reset,
        )

    # -- after a crash

    def reset(self, plan: StepPlan) -> PlanReport:
        """Forgets every table. All blocks are free again once the steps granted so far are done."""
        self.last_granted = min(self.last_granted, plan.step - 1)  # a grant that was made was not sent
        self._holdings.reset(plan.completed_step, self.last_granted)
        self._stride = self._last_slots = None
        return self._report(plan, np.zeros_like(plan.num_wanted), (), is_void=True, is_reset=True)


def _without_drafts(plan: StepPlan) -> StepPlan:
    if plan.drafts is None:
        return plan
    return replace(plan, num_wanted=plan.num_wanted - plan.drafts.counts, drafts=None)


def _cut_to_budget(plan: StepPlan) -> Ints:
    """[R] every row's share of the token budget: the plan's own `num_wanted` if that is enough for all."""
    num_rows = len(plan.slots)
    if (num_rows if plan.is_decode else int(plan.num_wanted.sum())) <= plan.token_budget:
        return plan.num_wanted
    before = np.cumsum(plan.num_wanted, dtype=np.int32) - plan.num_wanted
    granted: Ints = np.clip(plan.token_budget - before, 0, plan.num_wanted).astype(np.int32)
    if not plan.allows_partial:
        granted[granted < plan.num_wanted] = 0
    return granted
