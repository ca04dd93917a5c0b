"""The pool of KV blocks with the state of each. The block tables of the slots are in `block_tables.py`.

It deals with block ids and step numbers only; it touches no tensor.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from ...array_checks import num_true
from ...messages import Bools, Indices, Ints

if TYPE_CHECKING:
    from .plan_in_hand import PlanInHand

# Called with the cached blocks that were evicted, and the plan for which they were, if any.
EvictionListener = Callable[[list[int], "PlanInHand | None"], object]


class BlockState(enum.IntEnum):
    """The state of a block."""

    FREE = 0
    IN_USE = 1  # in at least one table
    CACHED = 2  # in no table, but its contents may be reused; evicted when free blocks run out
    QUARANTINED = 3  # in no table, while steps in flight may still touch it
    ABSENT = 4  # in a slab that is not lent to the pool's kind (`slab_pool.py`)


MANY_RUNS = 8  # with fewer runs of cached blocks, eviction is strictly least recently cached first
RUN_TOKENS = 256  # tokens whose keys are contiguous in the native cache

# Plain ints: numpy looks up `__array_ufunc__` of an enum member at each use, which is slow.
FREE, IN_USE, CACHED, QUARANTINED, ABSENT = (int(state) for state in BlockState)


class BlockPool:
    """The blocks [0, num_blocks): the state of each, and the number of tables that hold it.

    A block that its last table gives back is quarantined until every step that may still read or write it is done:
    `give_back` names the last such step, and `complete_steps` reports the completed one. Then the block is free; or
    cached, if `keep` marked its contents. A cached block is evicted when no block is free, approximately the least
    recently cached first. All counts are maintained incrementally.

    Consecutive ids are contiguous in memory and read faster, by a third on a CPU. So a table grows into the block after
    its last one, and starts in a *run*, an aligned group of `run_size` blocks, of which none is taken. While there are
    such runs, no table takes blocks into which another is about to grow. If much is cached, a table also grows into
    blocks that have been cached for long, although others are free. If no block is free, it starts with the first block
    of the long-cached range around the least recently cached one.
    """

    def __init__(self, num_blocks: int, block_size: int, run_size: int | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks = {num_blocks}: a pool holds at least 1 block")
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens a block
        self.num_free = num_blocks
        self.num_quarantined = 0
        self.num_absent = 0
        self.num_moves = 0  # state changes so far, other than free to in use
        self.num_evicted = 0  # cached blocks evicted so far
        self._listeners: list[EvictionListener] = []
        self.state = np.full(num_blocks, FREE, np.int8)  # [N]
        self.num_tables = np.zeros(num_blocks, np.int32)  # [N] tables that hold the block
        self.run_size = run_size = run_size or max(1, RUN_TOKENS // block_size)
        self._run_sizes = [min(run_size, num_blocks - first) for first in range(0, num_blocks, run_size)]  # [R] blocks
        self._num_free_of = self._run_sizes.copy()  # [R] blocks that are free
        self._whole = OrderedDict.fromkeys(reversed(range(len(self._run_sizes))))  # free runs; the last is next
        self._partly: OrderedDict[int, None] = OrderedDict()  # runs with some free blocks; the first is next
        self._is_kept = np.zeros(num_blocks, np.bool_)  # [N] whether the contents may be reused
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently cached first
        self._cached_at = np.zeros(num_blocks, np.int64)  # [N] value of the counter below at that time
        self._num_cachings = 0
        self._untold: list[int] = []  # blocks evicted by the current `take_behind`, not yet reported
        self._last_step = np.full(num_blocks, -1, np.int64)  # [N] last step that may touch the block, as given back
        self._quarantine: list[tuple[int, Ints]] = []  # (last step that may touch them, blocks)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give: free and cached ones."""
        return self.num_free + len(self._cached)

    @property
    def num_in_use(self) -> int:
        """Blocks in tables."""
        return self.num_blocks - self.num_absent - self.num_free - self.num_quarantined - len(self._cached)

    @property
    def num_shared(self) -> int:
        """Blocks in more than one table."""
        return int(np.count_nonzero(self.num_tables > 1))

    def subscribe(self, listener: EvictionListener) -> None:
        """Has `listener` called with the cached blocks that each later `take` evicts, and with the plan in hand.

        Their contents are lost once the blocks are written. Listeners are called in the order of their subscription;
        each must be right in any. They are bound methods, no closures: the time machine copies a pool with its owners.
        """
        self._listeners.append(listener)

    def take(self, count: int, hand: PlanInHand | None = None) -> Ints:
        """Takes `count` blocks, [count], for one new table; ids are consecutive where possible.

        Check `num_available` first.
        """
        return self.take_behind([-1], [count], count, hand)

    def take_behind(
        self, last_blocks: Sequence[int], counts: Sequence[int], total: int, hand: PlanInHand | None = None
    ) -> Ints:
        """Takes `total` blocks: `counts[i]` for a table whose last block is `last_blocks[i]` (-1: none).

        `hand` is the plan for which they are taken, if any: listeners to evictions get it.
        """
        is_there = total <= self.num_free + len(self._cached) or total <= self.num_available  # the latter takes time
        assert is_there, f"{total} blocks taken of {self.num_available} available"
        taken: list[int] = []
        state, num_free_of, size = self.state.data, self._num_free_of, self.run_size
        for last, count in zip(last_blocks, counts, strict=True):
            block, until = last + 1, len(taken) + count
            if count == 1 and block % size and block < self.num_blocks and state[block] == FREE:
                run = block // size  # `_extend_run`, for most rows that decode
                self.num_free -= 1
                num_free_of[run] -= 1
                if not num_free_of[run]:
                    del self._partly[run]
                state[block] = IN_USE
                taken.append(block)
                continue
            self._extend_run(block, until, taken)
            while len(taken) < until:
                found = self._find_free(until - len(taken))
                self.state[found] = IN_USE
                self.num_free -= len(found)
                self._count_free(int(found[0]) // self.run_size, -len(found))
                taken += found.tolist()
        if self._untold:
            self._notify_evicted(hand)
        assert len(taken) == total, f"{len(taken)} blocks taken where {total} were requested"
        blocks = np.array(taken, np.int32)
        self.num_tables[blocks] = 1
        return blocks

    def _extend_run(self, block: int, until: int, taken: list[int]) -> None:
        """Takes consecutive blocks from `block` on, until `taken` has `until` entries.

        Stops at the end of the run or at a block in use.
        """
        state, num_free_of, run = self.state, self._num_free_of, block // self.run_size
        while len(taken) < until and block % self.run_size and block < self.num_blocks:
            if state[block] == FREE:
                self.num_free -= 1
                num_free_of[run] -= 1
                if not num_free_of[run]:
                    del self._partly[run]  # it was not whole, as the block before is in use
            elif state[block] == CACHED and self._may_choose() and self._cached_at[block] <= self._old_until():
                del self._cached[block]
                self._is_kept[block] = False
                self._untold.append(block)
                self.num_moves += 1
            else:
                return
            state[block] = IN_USE
            taken.append(block)
            block += 1

    def _find_free(self, count: int) -> Indices:
        """Up to `count` free blocks of one run, ascending. Evicts cached ones if no block is free."""
        if not self.num_free:
            self._evict_for(count)
        if self._whole:
            run = next(reversed(self._whole))
            first = run * self.run_size
            return np.arange(first, first + min(count, self._run_sizes[run]))
        first = next(iter(self._partly)) * self.run_size
        found: Indices = (self.state[first : first + self.run_size] == FREE).nonzero()[0][:count] + first
        return found

    def _evict_for(self, count: int) -> None:
        """Evicts up to `count` cached blocks for one table.

        They are the first blocks of the contiguous long-cached range around the least recently cached block, within its
        run.
        """
        if not self._may_choose():
            return self._evict(list(islice(self._cached, count)))
        oldest = next(iter(self._cached))
        first = oldest // self.run_size * self.run_size
        run = slice(first, first + self.run_size)
        others = ((self.state[run] != CACHED) | (self._cached_at[run] > self._old_until())).nonzero()[0] + first
        behind = int(others.searchsorted(oldest))
        begin = int(others[behind - 1]) + 1 if behind else first
        end = int(others[behind]) if behind < len(others) else min(run.stop, self.num_blocks)
        self._evict(list(range(begin, min(begin + count, end))))

    def _may_choose(self) -> bool:
        """Whether enough is cached to choose among the older half."""
        return len(self._cached) >= MANY_RUNS * self.run_size

    def _old_until(self) -> int:
        """The value of `_cached_at` up to which a block counts as cached for long: the older half."""
        oldest = int(self._cached_at[next(iter(self._cached))])
        return (oldest + self._num_cachings) // 2

    def _count_free(self, run: int, num_more: int) -> None:
        """Changes the number of free blocks of a run."""
        before = self._num_free_of[run]
        now = self._num_free_of[run] = before + num_more
        size = self._run_sizes[run]
        if before == size:
            del self._whole[run]
        elif before:
            if 0 < now < size:
                return
            del self._partly[run]
        if now == size:
            self._whole[run] = None
        elif now:
            self._partly[run] = None

    def share(self, blocks: Ints) -> None:
        """Adds `blocks`, all of them kept, to one more table.

        They may be in use, cached or quarantined.
        """
        states = self.state[blocks]
        assert self._is_kept[blocks].all(), f"blocks {blocks.tolist()} shared, not all of them kept"
        for block in blocks[states == CACHED].tolist():
            del self._cached[block]
        self.num_quarantined -= int(np.count_nonzero(states == QUARANTINED))
        self.num_moves += 1
        self.state[blocks] = IN_USE
        self.num_tables[blocks] += 1

    def keep(self, blocks: Ints) -> None:
        """Marks `blocks`, which are in use: their contents may be reused."""
        self._is_kept[blocks] = True

    def forget(self, block: int) -> None:
        """Unmarks `block`: its contents will not be reused. A cached block becomes free."""
        self._is_kept[block] = False
        if self.state[block] == CACHED:
            del self._cached[block]
            self._push(np.array([block], np.int32))

    def give_back(self, blocks: Ints, last_step: int, completed_step: int) -> None:
        """Removes `blocks` from one table.

        A block in no table becomes available once all steps up to the highest `last_step` given for it are done.
        """
        if not len(blocks):
            return
        is_used = self.state[blocks] == IN_USE
        assert num_true(is_used) == len(blocks), f"blocks {blocks.tolist()} given back, not all in use"
        num_tables = self.num_tables[blocks] = self.num_tables[blocks] - 1
        last_steps = self._last_step[blocks] = np.maximum(self._last_step[blocks], last_step)
        is_unused = num_tables == 0
        blocks, last_steps = blocks[is_unused], last_steps[is_unused]
        is_done = last_steps <= completed_step
        if num_true(is_done):
            self._release(blocks[is_done])
            blocks, last_steps = blocks[~is_done], last_steps[~is_done]
        if len(blocks):
            self.num_moves += 1
            self.state[blocks] = QUARANTINED
            self.num_quarantined += len(blocks)
            self._quarantine.append((int(np.maximum.reduce(last_steps)), blocks))

    def pass_by(self, blocks: Ints) -> None:
        """A window is about to give these back: see `WindowPool`. Other pools treat all blocks alike."""

    def is_passed(self, block: int) -> bool:
        """Whether a window has passed the block, and no sequence has used it since."""
        return False

    def complete_steps(self, completed_step: int) -> None:
        """Every step up to `completed_step` is done: releases the blocks quarantined for them."""
        if not self._quarantine:
            return
        waiting, self._quarantine = self._quarantine, []
        for last_step, blocks in waiting:
            if last_step > completed_step:
                self._quarantine.append((last_step, blocks))
                continue
            is_due = (self.state[blocks] == QUARANTINED) & (self._last_step[blocks] <= completed_step)
            blocks = blocks[is_due]  # others were shared meanwhile, and perhaps given back again
            self.num_quarantined -= len(blocks)
            self._release(blocks)

    def forget_kept(self) -> int:
        """Unmarks all blocks. Returns the number of cached blocks that became free."""
        blocks = list(self._cached)
        self._cached.clear()
        self._is_kept[:] = False
        self._push(np.array(blocks, np.int32))
        return len(blocks)

    def seize_all(self, last_step: int) -> None:
        """Takes all blocks from all tables, after a crash.

        They become free once step `last_step` is done.
        """
        self._cached.clear()
        self._untold.clear()
        self._is_kept[:] = False
        self.num_moves += 1
        self.state[:] = QUARANTINED
        self.num_tables[:] = 0
        self._last_step[:] = last_step
        self.num_free = 0
        self._num_free_of = [0] * len(self._run_sizes)
        self._whole.clear()
        self._partly.clear()
        self.num_quarantined = self.num_blocks
        self._quarantine = [(last_step, np.arange(self.num_blocks, dtype=np.int32))]

    def _release(self, blocks: Ints) -> None:
        """Makes blocks available: kept ones as cached, others as free.

        The last block of a table is evicted first: the blocks before it are useful without it, but not the reverse.
        """
        is_kept = self._is_kept[blocks]
        if num_true(is_kept):
            self.num_moves += 1
            kept = blocks[is_kept]
            self.state[kept] = CACHED
            self._num_cachings += 1
            self._cached_at[kept] = self._num_cachings
            self._cached.update(dict.fromkeys(kept[::-1].tolist()))
            blocks = blocks[~is_kept]
        self._push(blocks)

    def _evict(self, evicted: list[int]) -> None:
        """Frees cached blocks. `take_behind` reports them once it is done."""
        for block in evicted:
            del self._cached[block]
        blocks = np.array(evicted, np.int32)
        self._is_kept[blocks] = False
        self._push(blocks)
        self._untold += evicted

    def _notify_evicted(self, hand: PlanInHand | None) -> None:
        evicted, self._untold = self._untold, []
        self.num_evicted += len(evicted)
        for listener in self._listeners:
            listener(evicted, hand)

    def _push(self, blocks: Ints) -> None:
        self.num_moves += 1
        self.state[blocks] = FREE
        self.num_free += len(blocks)
        for run, count in Counter((blocks // self.run_size).tolist()).items():
            self._count_free(run, count)

    def is_alone(self, blocks: Ints, completed_step: int) -> Bools:
        """Whether one table holds each block, and no step in flight reads it for one that has held it."""
        found: Bools = (self.num_tables[blocks] == 1) & (self._last_step[blocks] <= completed_step)
        return found

    def is_kept(self, blocks: Ints) -> Bools:
        """Whether the contents of each block may be reused."""
        return self._is_kept[blocks]

    def kept(self) -> set[int]:
        """Blocks whose contents may be reused."""
        return set(self._is_kept.nonzero()[0].tolist())

    def check(self) -> None:
        """Raises AssertionError unless the counts, the states and the runs agree (I3, I4)."""
        counted = np.bincount(self.state, minlength=len(BlockState))
        kept_counts = [self.num_free, self.num_in_use, self.num_cached, self.num_quarantined, self.num_absent]
        assert counted.tolist() == kept_counts, f"blocks by state are {counted.tolist()}, counted {kept_counts}"
        firsts = np.arange(0, self.num_blocks, self.run_size)
        num_free_of = np.add.reduceat(self.state == FREE, firsts, dtype=np.int64).tolist()
        assert num_free_of == self._num_free_of, f"free blocks by run are {num_free_of}, counted {self._num_free_of}"
        whole = {run for run, count in enumerate(num_free_of) if count == self._run_sizes[run]}
        partly = {run for run, count in enumerate(num_free_of) if 0 < count < self._run_sizes[run]}
        assert whole == set(self._whole) and partly == set(self._partly), "a run is in the wrong list"
        is_used = self.state == IN_USE
        assert ((self.num_tables > 0) == is_used).all(), "a block is in use by no table, or in a table and not in use"
        if self._cached:
            cached = np.array(list(self._cached), np.int64)
            assert (self.state[cached] == CACHED).all(), "a block among the cached ones is not cached"
            assert self._is_kept[cached].all(), "a cached block is not marked as kept"
        if self.num_quarantined:
            is_waiting = np.zeros(self.num_blocks, np.bool_)
            for _, blocks in self._quarantine:
                is_waiting[blocks] = True
            assert is_waiting[self.state == QUARANTINED].all(), "a quarantined block waits for no step"
