"""The blocks of each slot, on the device and, waiting to be copied back, on the host.

The allocator decides how much each row gets; this file carries it out, with `sequence_starts.py` for rows that start
with tokens and `window_blocks.py` for blocks that windows pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...kernels.layout.kv_layout import KVLayout
from ..messages import NO_INDICES, NO_INTS, STATES, BlockCopy, Direction, Indices, Ints, TableEntries
from .evictions import Evictions, KindEvictions
from .prefix_cache import PrefixCache
from .prefix_publisher import PrefixPublisher
from .sequence_starts import SequenceStarts
from .tiers.device_tier import DeviceTier
from .tiers.host_tier import HostTier
from .tiers.plan_in_hand import PlanInHand
from .window_blocks import WindowBlocks


@dataclass(frozen=True, slots=True, eq=False)
class Growth:
    """New blocks of one kind for some rows of a plan."""

    rows: Indices  # [G]
    counts: Ints  # [G] blocks for each
    num_blocks: int  # in all
    again: Indices  # rows beside those that go on in a block that their window has passed


class SlotBlocks:
    """The blocks of the slots in both tiers. What a plan causes is collected in the plan in hand."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        blocks_per_slot: int,
        cache: PrefixCache | None,
        host: HostTier | None,
        layout: KVLayout | None = None,
    ) -> None:
        keeps_prefixes = cache is not None or host is not None
        sizes = num_blocks, block_size, num_slots, blocks_per_slot
        self.device = device = DeviceTier(*sizes, layout, keeps_prefixes=keeps_prefixes)
        self.host = host
        self.publisher = None if cache is None else PrefixPublisher(cache, device.pool, device.tables)
        self._evictions = self._listen(layout)  # of each kind, with a prefix cache
        self.starts = SequenceStarts(num_slots, device, host, self.publisher)
        self.windows = WindowBlocks(device, self.publisher)
        self.last_step = np.full(num_slots, -1, np.int64)  # [S] the last step that may touch the slot's blocks

    def _listen(self, layout: KVLayout | None) -> list[Evictions | KindEvictions]:
        """Has the prefix cache, if there is one, know of the kinds and hear of evictions."""
        device, host, publisher = self.device, self.host, self.publisher
        kinds, host_pools = device.more, [None] * len(device.more) if host is None else host.more
        assert len(host_pools) == len(kinds), f"{1 + len(kinds)} kinds, and host pools of {1 + len(host_pools)}"
        if publisher is None:
            return []
        for each, host_pool in zip(kinds, host_pools, strict=True):
            assert layout is not None
            publisher.add_kind(layout.kinds[each.kind - device.has_index], each.pool, each.tables, host_pool)
        more = [KindEvictions(publisher, host, each.kind, each.pool) for each in kinds]
        return [Evictions(publisher, host, device.pool), *more]

    # -- updates

    def apply_updates(self, hand: PlanInHand) -> None:
        """Applies the updates of a plan: completed steps, and ended, preempted or started sequences."""
        plan = hand.plan
        if self.publisher is not None:
            self.publisher.complete_steps(plan)
        self.device.complete_steps(plan.completed_step)
        if self.host is not None:
            lost = self.host.complete_steps(plan.completed_step, plan.voided, plan.generation)
            for evictions in self._evictions:
                evictions.on_host(self.host.take_lost(evictions.kind) if evictions.kind else lost)
            for sequence_id in plan.discarded:
                self.host.release(sequence_id, plan.step - 1, plan.completed_step)  # an earlier step may copy into them
        for slot, num_accepted in plan.accepted:
            self.device.tables.num_tokens[slot] += num_accepted
        if self.publisher is not None and self.publisher.cache.snapshots is not None:
            self._save_ends(hand)
        for slot in (*plan.ended, *plan.dropped):
            self.empty(hand, slot)
        for slot in plan.preempted:
            self.preempt(hand, slot)
        for started in plan.started:
            self.starts.add(started)

    def _save_ends(self, hand: PlanInHand) -> None:
        """Collects the copies of the states of ended sequences to snapshots, before other sequences get their slots."""
        assert self.publisher is not None
        plan, places = hand.plan, {}
        for slot in plan.ended:
            if slot not in plan.dropped and slot not in self.starts.started:
                place = self.publisher.save_end(slot, plan)
                if place is not None:
                    places[slot] = place
        if places:
            arrays = np.array(list(places), np.int32), np.array(list(places.values()), np.int32)
            hand.copies.append(BlockCopy(Direction.FORK, *arrays, STATES))

    def empty(self, hand: PlanInHand, slot: int) -> None:
        """Takes all blocks of a slot.

        They become available when the last step that may touch them is done.
        """
        self.starts.drop(hand, slot)
        if self.publisher is not None:
            self.publisher.drop(slot)
        self.device.clear(slot, int(self.last_step[slot]))

    def preempt(self, hand: PlanInHand, slot: int) -> None:
        """Preempts a slot in the plan in hand: swaps it out if there is room and it pays.

        Blocks that were not copied back from the host yet stay there.
        """
        num_tokens = int(self.device.tables.num_tokens[slot])
        may_return = num_tokens and slot not in self.starts.started and not self.starts.must_compute[slot]
        if self.host is not None and may_return:
            self._swap_out(hand, slot, num_tokens, self.host)
        self.empty(hand, slot)

    def _swap_out(self, hand: PlanInHand, slot: int, num_tokens: int, host: HostTier) -> None:
        """Collects the copies of a slot's blocks to the host, if it takes them."""
        device, sequence_id = self.device, int(self.starts.sequence_ids[slot])
        live = [each.tables.live_blocks(slot, num_tokens) for each in device.more]
        kept = host.swap_out(sequence_id, num_tokens, [len(blocks) for blocks in live])
        if kept is None:
            return
        blocks = device.tables.blocks[slot, : len(kept)].copy()
        hand.copies.append(BlockCopy(Direction.OUT, blocks, kept))
        for each, blocks, places in zip(device.more, live, host.more_blocks(sequence_id), strict=True):
            if len(blocks):
                hand.copies.append(BlockCopy(Direction.OUT, blocks, places, each.kind))
        if len(place := host.state(sequence_id)):
            hand.copies.append(BlockCopy(Direction.OUT, np.array([slot], np.int32), place, STATES))
        hand.swapped[slot] = num_tokens
        self.last_step[slot] = hand.plan.step

    # -- granting

    def grow(self, hand: PlanInHand, slots: Indices, counts: Ints, num_blocks: int) -> tuple[Indices, Indices, Ints]:
        """Takes `num_blocks` new blocks, `counts[i]` for `slots[i]`.

        Returns (slot, place, block) of each, and of the shared blocks with which sequences start.
        """
        blocks = self.device.pool.take_behind(self.device.tables.last_blocks(slots), counts.tolist(), num_blocks, hand)
        table_slots, table_places = self.device.tables.append(slots, counts, blocks)
        for slot, beginning in hand.begun.items():
            found = beginning.shared
            table_slots = np.concatenate([table_slots, np.full(len(found), slot)])
            table_places = np.concatenate([table_places, np.arange(len(found))])
            blocks = np.concatenate([blocks, found])
        return table_slots, table_places, blocks

    def grow_more(self, hand: PlanInHand, growths: Sequence[Growth]) -> tuple[TableEntries, ...]:
        """Takes the new blocks of the kinds after kind 0. Their entries come with those of shared blocks."""
        made = []
        for each, growth in zip(self.device.more, growths, strict=True):
            slots, places, blocks = NO_INDICES, NO_INDICES, NO_INTS
            if growth.num_blocks:
                slots = hand.plan.slots[growth.rows]
                last_blocks = each.tables.last_blocks(slots)
                blocks = each.pool.take_behind(last_blocks, growth.counts.tolist(), growth.num_blocks, hand)
                slots, places = each.tables.append(slots, growth.counts, blocks)
            if len(growth.again):
                own_slots, own_places, own_blocks = self.windows.go_on(each, hand.plan.slots[growth.again])
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

    def save_states(self, hand: PlanInHand, places: dict[int, int]) -> None:
        """Collects the copies of the states behind the plan's rows to snapshots, `places` by slot."""
        if places:
            arrays = np.array(list(places), np.int32), np.array(list(places.values()), np.int32)
            hand.copies.append(BlockCopy(Direction.SAVE, *arrays, STATES))

    # -- after a crash

    def reset(self, completed_step: int, last_granted: int) -> None:
        """Clears all block tables. All blocks become free once the steps granted so far are done."""
        self.starts.started.clear()
        if self.publisher is not None:
            self.publisher.drop_all()
        self.device.reset(completed_step, last_granted)
        if self.host is not None:
            self.host.forget_all(last_granted)
            for pool in self.host.pools:
                pool.complete_steps(completed_step)

    def check(self) -> None:
        """Raises AssertionError unless pools, tables and cache agree (I3, I4, I11).

        Each block is in as many tables as the pool counts, and the pool keeps exactly the blocks in the cache.
        """
        self.device.check(may_share=self.publisher is not None)
        if self.publisher is not None:
            self.publisher.check()
        if self.host is not None:
            self.host.check()
            places = set() if self.publisher is None else self.publisher.cache.places()
            assert self.host.pool.kept() == places, "the host pool keeps other blocks than the cache holds"
