"""Serves plans: the tokens and blocks of each row, and the slots preempted for them.

Plain code behind the allocate stage; it touches no tensor. `slot_blocks.py` holds the state of each slot,
`plan_growth.py` finds and takes the blocks that rows need, and `preemption.py` serves a plan when they run short.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...kernels.layout.kv_layout import KVLayout, KVRoom
from ..array_checks import total
from ..messages import (
    NO_INDICES,
    NO_INTS,
    BlockCopy,
    Indices,
    Ints,
    PlanReport,
    Rates,
    StepGrant,
    StepPlan,
    TableEntries,
)
from .plan_growth import PlanAllocation, PlanGrowth
from .preemption import Preemptor
from .prefix_cache import PrefixCache
from .slot_blocks import SlotBlocks
from .steady_decode import SteadyDecode, SteadyLanes
from .tiers.block_tables import BlockTables
from .tiers.device_tier import without_index
from .tiers.host_tier import HostTier
from .tiers.plan_in_hand import PlanInHand


class Allocator:
    """Serves one plan after another from one pool.

    Rows are served in order: each gets min(wanted, budget left) tokens and the blocks for them. A row that does not fit
    is left out. The allocator never waits, never reorders, and preempts only in the order of the plan's victims.

    With a `cache`, a sequence starts with the cached blocks of its first tokens. They are shared, never written, and
    count as granted without being computed. If a cached block matches only in part, the sequence gets a copy of it. A
    sequence whose next block another sequence is computing is left out until that block is cached.

    With a `host`, the blocks of a preempted sequence are copied there if there is room, and copied back when it is
    served again. Drafts get blocks like other tokens; they count as computed once schedule reports them as accepted.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_model_len: int,
        cache: PrefixCache | None = None,
        host: HostTier | None = None,
        layout: KVLayout | None = None,
        num_lanes: int = 1,
    ) -> None:
        """`num_lanes`: plans of steady decoding that take turns, each with rows of its own."""
        blocks_per_slot = -(-max_model_len // block_size)
        if layout is not None:
            _check_size(layout, max_model_len)
        elif num_blocks < blocks_per_slot:
            raise ValueError(
                f"num_blocks = {num_blocks}: one sequence of max_model_len = {max_model_len} tokens needs "
                f"{blocks_per_slot} blocks of {block_size}; the largest that fits is {num_blocks * block_size} tokens"
            )
        self.last_granted = -1  # number of the last granted step
        self.layout = layout  # None: one kind whose queries see all keys
        self._slot_blocks = SlotBlocks(num_blocks, block_size, num_slots, blocks_per_slot, cache, host, layout)
        self._device, self._windows = self._slot_blocks.device, self._slot_blocks.windows
        self._starts = self._slot_blocks.starts
        self.kinds = self._device.with_memory  # public, for inspection
        self._more = self._device.more  # the kinds after kind 0
        self._has_windows = self._device.has_windows
        kinds = range(0 if layout is None else len(layout.kinds))
        self._most_of_one = [layout.most_blocks(kind, max_model_len) for kind in kinds] if layout is not None else []
        self.pool, self.tables = self.kinds[0].pool, self.kinds[0].tables  # public, for inspection
        self._pool, self._tables = self._device.pool, self._device.tables
        self._growth = PlanGrowth(num_slots, self._device, self._windows)
        self._nothing = np.zeros(num_slots, np.int32)  # `num_cached` of most plans
        self._all_slots = np.arange(num_slots)
        self._steady = SteadyLanes(num_lanes)  # for rows of the last plans, if these had only decodes

    # -- inspection and settings

    @property
    def sequence_ids(self) -> NDArray[np.int64]:
        """[S] the sequence whose blocks each slot holds or held last; -1: none yet."""
        return self._starts.sequence_ids

    @property
    def host(self) -> HostTier | None:
        """The host tier; None if swapping is off."""
        return self._slot_blocks.host

    @property
    def cache(self) -> PrefixCache | None:
        """The prefix cache; None if it is off."""
        publisher = self._slot_blocks.publisher
        return None if publisher is None else publisher.cache

    @property
    def free_share(self) -> float:
        """The part of the device's memory that no sequence uses and that keeps no prefix, from 0 to 1."""
        slabs = self._device.slabs
        if slabs is None:
            return self.pool.num_free / self.pool.num_blocks
        return slabs.num_free / slabs.num_slabs

    @property
    def tables_of_prefixes(self) -> BlockTables:
        """The tables with the blocks by which the prefix cache finds its entries."""
        return self._tables

    def use_rates(self, rates: Rates) -> None:
        """Sets the rates by which swapping is weighed against recomputing."""
        if self.host is not None:
            self.host.rates = rates

    def reset_prefix_cache(self) -> int:
        """Empties the prefix cache.

        Returns the number of blocks freed. Running sequences keep their blocks.
        """
        if self._slot_blocks.publisher is None:
            return 0
        self._slot_blocks.publisher.forget()
        if self.host is not None:
            self.host.reset()
        if self._device.has_index:
            self._pool.forget_kept()
        return sum(each.pool.forget_kept() for each in self.kinds)

    def check(self) -> None:
        """Raises AssertionError unless pools, tables and cache agree (I3, I4, I11)."""
        self._slot_blocks.check()

    # -- serving a plan

    def serve(self, plan: StepPlan) -> tuple[StepGrant | None, PlanReport]:
        """Returns the grant and the report. The grant is None if nothing can run or be copied."""
        slot_blocks, hand = self._slot_blocks, PlanInHand.of(plan)
        slot_blocks.apply_updates(hand)
        steady = self._steady_rows_of(plan)
        if steady is not None:
            return self._serve_steady(hand, steady)
        starting_rows = self._starts.starting_rows(hand)
        for row in starting_rows:
            self._starts.attach(hand, row, may_fork=True)
        granted = _cut_to_budget(hand)
        if slot_blocks.publisher is not None and plan.allows_partial and not plan.is_decode:
            granted = slot_blocks.publisher.end_at_snapshots(plan.slots, granted)
        if starting_rows:
            granted = granted.copy()  # `remaining` changes where a row is detached
            for row in starting_rows:
                if not granted[row]:
                    self._starts.detach(hand, row)
        allocation = self._growth.needed(plan, granted, self.last_granted)
        if not self._growth.fits(allocation):
            if self._has_windows:  # of slots that start in this plan, tables have no blocks yet
                self._windows.retire(np.delete(self._all_slots, list(hand.begun)), self.last_granted)
            for row in starting_rows:
                self._starts.detach(hand, row)
            hand.drop_drafts()  # before any sequence is preempted or waits
            preemptor = Preemptor(slot_blocks, hand, starting_rows, self.last_granted)
            preemptor.serve()
            allocation = PlanAllocation.of(preemptor.granted, preemptor.new_blocks, preemptor.preempted)
        grant = self._grant(hand, allocation)
        return grant, self._report(hand, allocation.granted, allocation.preempted, is_void=grant is None)

    # -- steady decoding

    def _steady_rows_of(self, plan: StepPlan) -> SteadyDecode | None:
        """The state of steady decoding, if the rows are the last plan's and their blocks available."""
        if not plan.is_decode or plan.num_reserved is not None:
            self._end_steady(self._steady.clear())
            return None
        lane = self._steady.find(plan.slots)
        if lane is None or self._starts.started or len(plan.slots) > plan.token_budget:
            self._end_steady(self._steady.note(plan.slots))
            return None
        if lane.steady is None:
            if self._has_windows:
                self._windows.retire_missed(plan.slots, self.last_granted)
            in_flight = range(plan.completed_step + 1, self.last_granted + 1)
            lane.steady = SteadyDecode(plan.slots, self._device, self._windows, in_flight)
        if self._has_windows:
            lane.steady.prepare(plan.completed_step, self.last_granted)
        if not lane.steady.is_whole or not self._has_blocks_for(lane.steady):
            self._end_steady(self._steady.forget(lane))
            return None
        return lane.steady

    def _has_blocks_for(self, steady: SteadyDecode) -> bool:
        """Whether the pools have the blocks of the next step."""
        if not self._more:
            return steady.growth.num_blocks <= self._pool.num_available
        needs = steady.needs()
        if self._device.slabs is None:
            return self._device.fits(needs)
        steady.reserves = not self._device.has_free(needs)
        return not steady.reserves or self._device.fits(needs)

    def _end_steady(self, ended: Sequence[SteadyDecode]) -> None:
        """Ends the steady decoding of rows, which have not yet given back all that their windows have passed."""
        if self._has_windows:
            for steady in ended:
                self._windows.retire(steady.slots, self.last_granted)

    def _serve_steady(self, hand: PlanInHand, steady: SteadyDecode) -> tuple[StepGrant, PlanReport]:
        plan = hand.plan
        table_slots, table_places, blocks = NO_INDICES, NO_INDICES, NO_INTS
        more_tables = self._grow_steady(hand, steady) if self._more else ()
        growth = steady.growth
        if growth.num_rows:
            if count := growth.num_blocks:
                blocks = self._pool.take_behind(growth.last_blocks(), [1] * count, count, hand)
            table_slots, table_places, blocks = growth.grow(blocks)
        if steady.reserves:
            self._device.give_back_unused()
        copies: Sequence[BlockCopy] = hand.copies
        if self._device.has_index:
            copies, first, more_tables = without_index(copies, more_tables)
            table_slots, table_places, blocks = first.slots, first.places, first.blocks
        starts = steady.step(plan.step)
        self.last_granted = plan.step
        self._slot_blocks.last_step[plan.slots] = plan.step
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
            copies=tuple(copies),
            adapter_loads=plan.adapter_loads,
            more_tables=more_tables,
        )
        return grant, self._report(hand, plan.num_wanted, ())

    def _grow_steady(self, hand: PlanInHand, steady: SteadyDecode) -> tuple[TableEntries, ...]:
        """Makes room for all kinds, and takes the blocks of those after kind 0."""
        if steady.reserves:
            self._device.reserve(steady.needs(), hand)
        made = []
        for each, growth in zip(self._more, steady.more, strict=True):
            blocks = NO_INTS
            if count := growth.num_blocks:
                blocks = each.pool.take_behind(growth.last_blocks(), [1] * count, count, hand)
            if growth.num_rows:
                made.append(TableEntries(each.kind, *growth.grow(blocks)))
        return tuple(made)

    # -- grant and report

    def _grant(self, hand: PlanInHand, allocation: PlanAllocation) -> StepGrant | None:
        slot_blocks, tables, plan = self._slot_blocks, self._tables, hand.plan
        slots, granted, is_sampled, drafts = plan.slots, allocation.granted, plan.reaches_end, hand.drafts
        if granted is not plan.num_wanted:
            rows = granted.nonzero()[0]
            slots, granted = plan.slots[rows], allocation.granted[rows]
            is_sampled = plan.reaches_end[rows] & (granted == hand.remaining[rows])
            drafts = None if drafts is None else drafts.take(rows)
        if not len(slots) and not hand.copies and not plan.adapter_loads:
            return None
        table_slots, table_places, blocks, more_tables = self._growth.take(hand, allocation)
        starts = tables.num_tokens[slots]
        ends = starts + granted
        tables.num_tokens[slots] = ends if drafts is None else ends - drafts.counts
        self.last_granted = plan.step
        slot_blocks.last_step[slots] = plan.step
        if hand.begun:
            self._starts.fork(hand)
            self._starts.copy_in(hand)
            self._starts.restore_states(hand)
        if slot_blocks.publisher is not None and not plan.is_decode:
            places = slot_blocks.publisher.note_grant(plan.step, slots, starts, ends, self._num_begun(hand, slots))
            slot_blocks.save_states(hand, places)
        if self._has_windows:
            self._windows.retire_after(plan, slots, granted)
        copies: Sequence[BlockCopy] = hand.copies
        if self._device.has_index:
            copies, first, more_tables = without_index(copies, more_tables)
            table_slots, table_places, blocks = first.slots, first.places, first.blocks
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
            started=self._starts.take(hand, slots) if self._starts.started else (),
            copies=tuple(copies),
            adapter_loads=plan.adapter_loads,
            more_tables=more_tables,
        )

    def _num_begun(self, hand: PlanInHand, slots: Indices) -> Ints:
        """[R] tokens with which sequences in these slots start in this plan; `_nothing` for most plans."""
        return hand.num_begun(slots) if hand.begun else self._nothing[: len(slots)]

    def _report(
        self,
        hand: PlanInHand,
        granted: Ints,
        preempted: Sequence[int],
        *,
        is_void: bool = False,
        is_reset: bool = False,
    ) -> PlanReport:
        pool, host = self.pool, self.host
        slabs = self._device.slabs
        if slabs is None:
            num_free, num_quarantined = pool.num_available, pool.num_quarantined
            room = self._room_of_window() if self._has_windows else None
        else:
            num_free, num_quarantined, room = slabs.room(self._most_of_one)
        return PlanReport(
            step=hand.plan.step,
            num_granted=granted,
            num_cached=self._num_begun(hand, hand.plan.slots),
            preempted=preempted,
            num_free=num_free,
            num_quarantined=num_quarantined,
            num_host_free=0 if host is None else host.with_memory[0].num_available,
            num_host_quarantined=0 if host is None else host.with_memory[0].num_quarantined,
            swapped=hand.swapped,
            is_void=is_void,
            is_reset=is_reset,
            kv_room=room,
        )

    def _room_of_window(self) -> KVRoom:
        """What is left of a cache of one kind, which is of a window."""
        return KVRoom((self.pool.num_available + self.pool.num_quarantined,), (0,), 0, (1,))

    # -- after a crash

    def reset(self, plan: StepPlan) -> PlanReport:
        """Clears all block tables. All blocks become free once the steps granted so far are done."""
        self.last_granted = min(self.last_granted, plan.step - 1)  # a grant was made, but not sent
        self._slot_blocks.reset(plan.completed_step, self.last_granted)
        self._steady.clear()
        return self._report(PlanInHand.of(plan), np.zeros_like(plan.num_wanted), (), is_void=True, is_reset=True)


def _check_size(layout: KVLayout, max_model_len: int) -> None:
    """Raises ValueError unless one sequence of `max_model_len` tokens fits, alone and computed token by token."""
    size = layout.block_size
    needs = [layout.most_blocks(kind, max_model_len) for kind in range(len(layout.kinds))]
    if len(needs) == 1:
        if layout.num_blocks[0] < needs[0]:
            raise ValueError(
                f"num_blocks = {layout.num_blocks[0]}: one sequence of max_model_len = {max_model_len} tokens needs "
                f"{needs[0]} blocks of {size}"
            )
    elif layout.num_slabs < layout.slabs_of_one(max_model_len):
        words = [f"{need} blocks of kind {kind.name}" for need, kind in zip(needs, layout.kinds, strict=True)]
        raise ValueError(
            f"num_slabs = {layout.num_slabs} of {layout.slab_bytes} bytes: one sequence of max_model_len = "
            f"{max_model_len} tokens needs {layout.slabs_of_one(max_model_len)}, for {' and '.join(words)} of {size} "
            f"tokens; give more memory, or lower max_model_len"
        )


def _cut_to_budget(hand: PlanInHand) -> Ints:
    """[R] the tokens of each row within the token budget.

    Returns `hand.remaining` itself if all fit.
    """
    plan, remaining = hand.plan, hand.remaining
    num_rows = len(plan.slots)
    if (num_rows if plan.is_decode else total(remaining)) <= plan.token_budget:
        return remaining
    before = np.cumsum(remaining, dtype=np.int32) - remaining
    granted: Ints = np.clip(plan.token_budget - before, 0, remaining).astype(np.int32)
    if not plan.allows_partial:
        granted[granted < remaining] = 0
    return granted
