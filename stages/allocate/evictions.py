"""What becomes of the cached blocks that a pool evicts: they move to the host as far as that pays, or are forgotten."""

from __future__ import annotations

import numpy as np

from ..messages import BlockCopy, Direction
from .prefix_publisher import PrefixPublisher
from .tiers.block_pool import BlockPool
from .tiers.host_tier import HostTier
from .tiers.plan_in_hand import PlanInHand


class Evictions:
    """Listens to evictions of kind 0, on the device and on the host, and keeps the prefix cache true to them."""

    kind = 0

    def __init__(self, publisher: PrefixPublisher, host: HostTier | None, pool: BlockPool) -> None:
        self._publisher, self._host = publisher, host
        pool.subscribe(self.on_device)
        if host is not None:
            host.pool.subscribe(self.on_host)

    def on_device(self, blocks: list[int], hand: PlanInHand | None) -> None:
        """The device's pool evicted `blocks`. Copies them to the host, as far as there is room and it pays."""
        if self._host is None:
            return self._publisher.forget_blocks(blocks, hand)
        assert hand is not None, "cached blocks are evicted outside a plan, and no step can copy them"
        cache, offload_policy = self._publisher.cache, self._host.offload_policy
        moving = [block for block in blocks if not cache.is_tail(block) and not cache.is_on_host(block)]
        is_worthwhile = offload_policy.is_worthwhile(cache.num_host_hits, self._host.rates)
        if not is_worthwhile:
            moving = [block for block in moving if cache.is_sample(block)]
        places = self._host.adopt(len(moving), hand.plan.step, hand.plan.generation, hand.plan.completed_step)
        moving = moving[: len(places)]
        if is_worthwhile:
            offload_policy.charge(round(len(moving) * self._host.weight(self.kind)))
        for block in set(blocks).difference(moving):
            cache.forget(block)
        for block, place in zip(moving, places.tolist(), strict=True):
            displaced = cache.move_out(block, place)
            if displaced is not None:
                self._host.pool.forget(displaced)
        if moving:
            hand.copies.append(BlockCopy(Direction.OUT, np.array(moving, np.int32), places))

    def on_host(self, places: list[int], hand: PlanInHand | None = None) -> None:
        """The host's pool evicted the blocks at `places`, or they were never written."""
        for place in places:
            self._publisher.cache.forget_on_host(place)


class KindEvictions:
    """The same of a kind after kind 0. Blocks that a window has passed do not move to the host."""

    def __init__(self, publisher: PrefixPublisher, host: HostTier | None, kind: int, pool: BlockPool) -> None:
        self.kind = kind
        self._publisher, self._host = publisher, host
        self._index = publisher.kinds[kind - 1].index
        pool.subscribe(self.on_device)
        if host is not None:
            host.more[kind - 1].subscribe(self.on_host)

    def on_device(self, blocks: list[int], hand: PlanInHand | None) -> None:
        """The device's pool evicted `blocks`. Copies them to the host, as far as there is room and it pays."""
        if self._host is None:
            return self._publisher.forget_blocks_of(self.kind, blocks)
        assert hand is not None, "cached blocks are evicted outside a plan, and no step can copy them"
        offload_policy = self._host.offload_policy
        is_worthwhile = offload_policy.is_worthwhile(self._publisher.cache.num_host_hits, self._host.rates)
        moving = [block for block in blocks if self._index.may_move_out(block, samples_only=not is_worthwhile)]
        plan = hand.plan
        places = self._host.adopt(len(moving), plan.step, plan.generation, plan.completed_step, self.kind)
        moving = moving[: len(places)]
        if is_worthwhile:
            offload_policy.charge(round(len(moving) * self._host.weight(self.kind)))
        self._publisher.forget_blocks_of(self.kind, set(blocks).difference(moving))
        for block, place in zip(moving, places.tolist(), strict=True):
            self._index.move_out(block, place)
        if moving:
            hand.copies.append(BlockCopy(Direction.OUT, np.array(moving, np.int32), places, self.kind))

    def on_host(self, places: list[int], hand: PlanInHand | None = None) -> None:
        """The host's pool evicted the blocks at `places`, or they were never written."""
        for place in places:
            self._index.forget_on_host(place)
