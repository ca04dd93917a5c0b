"""Slabs that kinds of KV blocks borrow from one another, and the pool of blocks of one such kind.

A slab is lent to a kind when the kind needs a block and has none free. It goes back as soon as all of its blocks are
free. Cached blocks are evicted to lend their slab to another kind. See `KVLayout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ....kernels.layout.kv_layout import RUN_TOKENS, KVLayout, KVRoom
from ...messages import Indices, Ints
from .block_pool import ABSENT, CACHED, FREE, IN_USE, QUARANTINED, BlockPool

if TYPE_CHECKING:
    from .plan_in_hand import PlanInHand

PLENTY = 1 / 4  # share of slabs that are not lent, with which a new table gets a run of its own


class SlabPool:
    """The slabs of a cache of several kinds, and the pool of each kind.

    `needs` are blocks, one number a kind. A kind can have its own free and cached blocks, then slabs that are not lent,
    or whose blocks are all free or cached and of which their kind has no need.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.num_slabs = layout.num_slabs
        self.unlent = list(reversed(range(layout.num_slabs)))  # the last is next
        self.pools = tuple(KindPool(self, layout, kind) for kind in range(len(layout.kinds)))
        self._reserved: list[tuple[KindPool, int]] = []  # slabs lent for the plan in hand
        self._blocks_per_slab = layout.blocks_per_slab
        self._block_bytes = [kind.block_bytes for kind in layout.kinds]

    @property
    def has_plenty(self) -> bool:
        """Whether so many slabs are not lent that tables need not share runs."""
        return len(self.unlent) > PLENTY * self.num_slabs

    @property
    def num_free(self) -> float:
        """Slabs that hold nothing: those that are not lent, and the free blocks of the others as parts of slabs."""
        return len(self.unlent) + sum(pool.num_free / pool.blocks_per_slab for pool in self.pools)

    def fits(self, needs: Sequence[int], *, with_quarantined: bool = False) -> bool:
        """Whether all kinds can have their `needs`; `with_quarantined`, once the steps in flight are done."""
        lacking = -len(self.unlent)
        for pool, need in zip(self.pools, needs, strict=True):
            short = need - pool.num_own - pool.num_quarantined * with_quarantined
            if short > 0:
                lacking += -(-short // pool.blocks_per_slab)
        return lacking <= 0 or lacking <= self._num_spare(needs, with_quarantined=with_quarantined)

    def _num_spare(self, needs: Sequence[int], *, with_quarantined: bool = False) -> int:
        """Lent slabs that their kinds can give up."""
        pairs = zip(self.pools, needs, strict=True)
        return sum(pool.num_spare(need, with_quarantined=with_quarantined) for pool, need in pairs)

    def reserve(self, needs: Sequence[int], hand: PlanInHand | None) -> None:
        """Lends slabs until each kind has its `needs` free or cached; check `fits` first.

        A kind borrows rather than evicts its own cached blocks, unless it is the kind with most of them.
        """
        if self.has_free(needs):
            return
        self._reserve_own(needs, hand)
        for kind, pool in enumerate(self.pools):
            while pool.num_free < needs[kind]:
                donor = None if self.unlent else self._donor(kind, needs)
                if not self.unlent and (donor is None or self._cached_bytes(donor) <= self._cached_bytes(kind)):
                    break
                self._lend(pool, donor, hand)
        self._reserve_own(needs, hand)

    def _reserve_own(self, needs: Sequence[int], hand: PlanInHand | None) -> None:
        """Lends slabs until each kind has its `needs` free or cached.

        NOTE: evicting blocks of one kind may free those of another, whose slabs go back. So no kind is sure of its own
        until nothing is evicted any more.
        """
        while any(pool.num_own < need for pool, need in zip(self.pools, needs, strict=True)):
            for kind, pool in enumerate(self.pools):
                while pool.num_own < needs[kind]:
                    donor = None if self.unlent else self._donor(kind, needs)
                    assert self.unlent or donor is not None, f"{needs} blocks are reserved, and do not fit"
                    self._lend(pool, donor, hand)

    def _donor(self, kind: int, needs: Sequence[int]) -> int | None:
        """The other kind with most cached bytes of those that can give up a slab."""
        spare = [other for other, pool in enumerate(self.pools) if other != kind and pool.num_spare(needs[other])]
        return max(spare, key=self._cached_bytes, default=None)

    def _cached_bytes(self, kind: int) -> int:
        return self.pools[kind].num_cached * self._block_bytes[kind]

    def _lend(self, pool: KindPool, donor: int | None, hand: PlanInHand | None) -> None:
        if donor is not None:
            self.pools[donor].give_up_slab(hand)
        slab = self.unlent.pop()
        pool.borrow(slab)
        self._reserved.append((pool, slab))

    def give_back_unused(self) -> None:
        """Takes back the slabs that `reserve` lent and of which no block was taken, after the plan's blocks were.

        Evictions for one kind may free blocks of another, so that it needs fewer.
        """
        reserved, self._reserved = self._reserved, []
        for pool, slab in reserved:
            if pool.is_lent[slab]:
                pool.give_back_if_free(slab)

    def has_free(self, needs: Sequence[int]) -> bool:
        """Whether each kind has its `needs` free, so that there is nothing to reserve."""
        return all(need <= pool.num_free for pool, need in zip(self.pools, needs, strict=True))

    def room(self, most: Sequence[int]) -> tuple[int, int, KVRoom]:
        """Blocks of kind 0 that one more sequence could get, with as many of each other kind, or `most` of that.

        Returns those that it could get now, and how many more once the steps in flight are done; and what all kinds can
        get then.
        """
        own: list[int] = []
        idle: list[int] = []
        num_quarantined, left = 0, len(self.unlent)
        for pool, need in zip(self.pools, most, strict=True):
            num_cached = len(pool._cached)
            has = pool.num_free + num_cached
            idle.append(pool.num_idle if num_cached else 0)
            if own:  # kinds after kind 0, which keeps what it has
                left += min((has - need) // pool.blocks_per_slab, idle[-1])
            own.append(has + pool.num_quarantined)
            num_quarantined += pool.num_quarantined
        room = KVRoom(tuple(own), tuple(idle), len(self.unlent), self._blocks_per_slab)
        if left >= 0 and not num_quarantined:  # as in most steps
            return own[0] + left * self._blocks_per_slab[0], 0, room
        now = self._of_one_more([pool.num_own for pool in self.pools], idle, most)
        if not num_quarantined:
            return now, 0, room
        return now, max(1, self._of_one_more(own, idle, most) - now), room

    def _of_one_more(self, own: Sequence[int], idle: Sequence[int], most: Sequence[int]) -> int:
        """The same, of `own` blocks of each kind and `idle` slabs among them."""
        slabs = self._num_left([own[0], *most[1:]], own, idle)
        if slabs >= 0:
            return own[0] + slabs * self.pools[0].blocks_per_slab
        low, high = 0, max(most[1:])  # it gets less than `most`: the largest number that fits
        while low < high:
            middle = (low + high + 1) // 2
            needs = [middle, *(min(middle, each) for each in most[1:])]
            low, high = (middle, high) if self._num_left(needs, own, idle) >= 0 else (low, middle - 1)
        return low

    def _num_left(self, needs: Sequence[int], own: Sequence[int], idle: Sequence[int]) -> int:
        """Slabs that are left, or could be lent, once each kind has its `needs`; negative: so many are lacking."""
        left = len(self.unlent)
        for pool, need, has, num_idle in zip(self.pools, needs, own, idle, strict=True):
            slabs = (has - need) // pool.blocks_per_slab  # rounded down, so that a lack counts as a whole slab
            left += min(slabs, num_idle)
        return left

    def check(self) -> None:
        """Raises AssertionError unless each slab is lent to one kind, which uses it, or to none."""
        lent = [slab for pool in self.pools for slab in pool.is_lent.nonzero()[0].tolist()]
        assert sorted([*lent, *self.unlent]) == list(range(self.num_slabs)), "a slab is lent twice, or lost"


class WindowPool(BlockPool):
    """The blocks of a window that may be cached: those that it has passed are evicted before others."""

    def __init__(self, num_blocks: int, block_size: int, run_size: int | None = None) -> None:
        super().__init__(num_blocks, block_size, run_size)
        self._is_passed = np.zeros(num_blocks, np.bool_)  # [N] see `pass_by`
        self._has_passed = False  # whether any ever was

    def take_behind(
        self, last_blocks: Sequence[int], counts: Sequence[int], total: int, hand: PlanInHand | None = None
    ) -> Ints:
        taken = super().take_behind(last_blocks, counts, total, hand)
        if self._has_passed:
            self._is_passed[taken] = False
        return taken

    def share(self, blocks: Ints) -> None:
        super().share(blocks)
        self._is_passed[blocks] = False

    def pass_by(self, blocks: Ints) -> None:
        """Marks those that no other table holds: they are evicted before others.

        They may be cached, as a sequence may still start behind them; few do.
        """
        self._is_passed[blocks[self.num_tables[blocks] == 1]] = self._has_passed = True

    def is_passed(self, block: int) -> bool:
        return bool(self._is_passed[block])

    def _release(self, blocks: Ints) -> None:
        oldest = self._cached_at[next(iter(self._cached))] if self._cached else self._num_cachings
        super()._release(blocks)
        if not self._has_passed:
            return
        passed = blocks[self._is_passed[blocks] & self._is_kept[blocks]]
        self._cached_at[passed] = oldest
        for block in passed[::-1].tolist():
            self._cached.move_to_end(block, last=False)


class KindPool(WindowPool):
    """The blocks of one kind. Those in slabs that are not lent to it are absent."""

    def __init__(self, slabs: SlabPool, layout: KVLayout, kind: int) -> None:
        self.blocks_per_slab = size = layout.blocks_per_slab[kind]
        super().__init__(layout.num_blocks[kind], layout.block_size, _run_size(size, layout.block_size))
        self.state[:] = ABSENT
        self.num_free, self.num_absent = 0, self.num_blocks
        self._num_free_of = [0] * len(self._run_sizes)
        self._whole.clear()
        self.is_lent = np.zeros(layout.num_slabs, np.bool_)
        self._num_live = [0] * layout.num_slabs  # blocks of each slab in use or quarantined
        self.num_idle = 0  # slabs that it has and of which no block is in use or quarantined
        self._slabs = slabs
        self._evicted_by_take: list[Ints] | None = None  # while taking: their slabs are kept until it is done

    @property
    def num_own(self) -> int:
        """Free and cached blocks in slabs that it has."""
        return self.num_free + len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that it could have if no other kind needs any."""
        num_slabs = len(self._slabs.unlent) + sum(pool.num_spare(0) for pool in self._slabs.pools if pool is not self)
        return self.num_own + num_slabs * self.blocks_per_slab

    # -- slabs

    def num_spare(self, need: int, *, with_quarantined: bool = False) -> int:
        """Slabs that it can give up while it keeps `need` blocks."""
        own = self.num_own + self.num_quarantined * with_quarantined
        if own - need < self.blocks_per_slab:
            return 0
        num_idle = self.num_idle
        if with_quarantined and self.num_quarantined:
            num_in_use = np.count_nonzero(self.state.reshape(-1, self.blocks_per_slab) == IN_USE, axis=1)
            num_idle = int(np.count_nonzero(self.is_lent & (num_in_use == 0)))
        return min(num_idle, (own - need) // self.blocks_per_slab)

    def borrow(self, slab: int) -> None:
        """Gets `slab`, whose blocks become free."""
        self._move_slab(slab, FREE)
        for run in reversed(self._runs_of(slab)):  # the last is next
            self._num_free_of[run] = self.run_size
            self._whole[run] = None

    def give_up_slab(self, hand: PlanInHand | None) -> None:
        """Evicts the cached blocks of the slab whose loss matters least: few blocks, and long cached."""
        slabs = (self.is_lent & (np.array(self._num_live) == 0)).nonzero()[0]
        is_cached = self.state.reshape(-1, self.blocks_per_slab)[slabs] == CACHED
        oldest = int(self._cached_at[next(iter(self._cached))]) if self._cached else self._num_cachings
        ages = self._cached_at.reshape(-1, self.blocks_per_slab)[slabs] - oldest
        span = 1 + self._num_cachings - oldest
        loss = np.where(is_cached, span + ages, 0).sum(axis=1)  # the oldest counts half the newest
        slab = int(slabs[loss.argmin()])
        evicted = is_cached[loss.argmin()].nonzero()[0] + slab * self.blocks_per_slab
        if not len(evicted):  # it was borrowed for this plan, and is not needed after all
            return self.give_back_if_free(slab)
        self._evict(evicted.tolist())
        self._notify_evicted(hand)

    def _give_back_free(self, blocks: Ints) -> None:
        """Gives back those slabs of `blocks` of which all blocks are free."""
        for slab in set((blocks // self.blocks_per_slab).tolist()):
            self.give_back_if_free(slab)

    def give_back_if_free(self, slab: int) -> None:
        """Gives back a slab that it has, if all blocks are free."""
        if self._num_live[slab]:
            return
        first = slab * self.blocks_per_slab
        if not np.count_nonzero(self.state[first : first + self.blocks_per_slab] != FREE):
            for run in self._runs_of(slab):
                self._num_free_of[run] = 0
                del self._whole[run]
            self._move_slab(slab, ABSENT)
            self._slabs.unlent.append(slab)

    def _move_slab(self, slab: int, state: int) -> None:
        first, num_more = slab * self.blocks_per_slab, self.blocks_per_slab if state == FREE else -self.blocks_per_slab
        self.state[first : first + self.blocks_per_slab] = state
        self.num_free += num_more
        self.num_absent -= num_more
        self.is_lent[slab] = state == FREE
        self.num_idle += 1 if state == FREE else -1
        self.num_moves += 1

    def _runs_of(self, slab: int) -> range:
        num_runs = self.blocks_per_slab // self.run_size
        return range(slab * num_runs, (slab + 1) * num_runs)

    # -- blocks, as in the base, with the numbers of live ones

    def take_behind(
        self, last_blocks: Sequence[int], counts: Sequence[int], total: int, hand: PlanInHand | None = None
    ) -> Ints:
        evicted: list[Ints] = []
        self._evicted_by_take = evicted
        taken = super().take_behind(last_blocks, counts, total, hand)
        self._evicted_by_take = None
        self._count_live(taken, 1)
        for blocks in evicted:
            self._give_back_free(blocks)
        return taken

    def share(self, blocks: Ints) -> None:
        new = blocks[self.state[blocks] == CACHED]
        super().share(blocks)
        self._count_live(new, 1)

    def _count_live(self, blocks: Ints, change: int) -> None:
        """Counts these blocks as in use, or no more as in use or quarantined."""
        num_live = self._num_live
        for slab in (blocks // self.blocks_per_slab).tolist():
            was = num_live[slab]
            num_live[slab] = now = was + change
            if not was:
                self.num_idle -= 1
            elif not now:
                self.num_idle += 1

    def _release(self, blocks: Ints) -> None:
        self._count_live(blocks, -1)
        super()._release(blocks)

    def _push(self, blocks: Ints) -> None:
        super()._push(blocks)
        if self._evicted_by_take is None:
            self._give_back_free(blocks)
        else:
            self._evicted_by_take.append(blocks)

    def _find_free(self, count: int) -> Indices:
        slabs = self._slabs
        if slabs.unlent and not self._whole and (slabs.has_plenty or not self.num_own):
            self.borrow(slabs.unlent.pop())
        return super()._find_free(count)

    def seize_all(self, last_step: int) -> None:
        lent = (self.state != ABSENT).nonzero()[0].astype(np.int32)
        super().seize_all(last_step)
        self.state[:] = ABSENT
        self.state[lent] = QUARANTINED
        self.num_quarantined, self.num_absent = len(lent), self.num_blocks - len(lent)
        self._quarantine = [(last_step, lent)] if len(lent) else []
        self._num_live = (self.is_lent * self.blocks_per_slab).tolist()
        self.num_idle = 0
        self._evicted_by_take = None  # the crash may have come while taking

    def check(self) -> None:
        super().check()
        states = self.state.reshape(-1, self.blocks_per_slab)
        assert ((states != ABSENT) == self.is_lent[:, None]).all(), "blocks of a slab are absent, others are not"
        num_live = np.count_nonzero((states == IN_USE) | (states == QUARANTINED), axis=1)
        assert num_live.tolist() == self._num_live, f"live blocks by slab are {num_live}, counted {self._num_live}"
        num_idle = np.count_nonzero(self.is_lent & (num_live == 0))
        assert num_idle == self.num_idle, f"{num_idle} slabs are idle, counted {self.num_idle}"
        assert (states[self.is_lent] != FREE).any(axis=1).all(), "a slab is lent, and all of its blocks are free"


def _run_size(blocks_per_slab: int, block_size: int) -> int:
    """Blocks of a run: the divisor of the slab that is nearest to a run of tokens."""
    wanted = RUN_TOKENS / block_size
    divisors = [size for size in range(1, blocks_per_slab + 1) if blocks_per_slab % size == 0]
    return min(divisors, key=lambda size: max(size / wanted, wanted / size))
