"""The blocks of each slot, on the device and, waiting to be copied back, on the host.

Here the updates of a plan empty, preempt and start slots. `sequence_starts.py` gives blocks to rows that start with
tokens, `plan_growth.py` gives new ones, and `window_blocks.py` takes those that windows pass.
"""

from __future__ import annotations

import numpy as np

from ...kernels.layout.kv_layout import KVLayout
from ..messages import STATES, BlockCopy, Direction
from .evictions import Evictions, KindEvictions
from .prefix_cache import PrefixCache
from .prefix_publisher import PrefixPublisher
from .sequence_starts import SequenceStarts
from .tiers.device_tier import DeviceTier
from .tiers.host_tier import HostTier
from .tiers.plan_in_hand import PlanInHand
from .window_blocks import WindowBlocks


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
