"""Blocks of the KV cache: which are free, who holds which, and when a freed one may be used again.

Knows block ids and steps. Refuses to know sequences, policy or tensors.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from ..messages import Indices, Ints


class BlockState(enum.IntEnum):
    """Every block is in exactly one of these."""

    FREE = 0
    IN_USE = 1  # in one table or more
    CACHED = 2  # in no table, but its contents may be wanted again; taken when free ones run out
    QUARANTINED = 3  # in no table, while steps in flight may still touch it


MANY_RUNS = 8  # of cached blocks; with fewer, what is evicted is what was cached longest ago, to the block
RUN_TOKENS = 256  # whose keys lie side by side in the native cache

# Plain numbers: numpy looks for an `__array_ufunc__` of an enum's member each time it meets one, and that takes long.
FREE, IN_USE, CACHED, QUARANTINED = (int(state) for state in BlockState)


class BlockPool:
    """The ids [0, num_blocks), the state of each, and how many tables hold it.

    A block that the last table gives back is quarantined until every step that might still read or write it is done:
    `give_back` names the last such step, and `settle` says how far the device has come. Then it is free; or, if `keep`
    said that its contents may be wanted again, cached, until it is taken because no other is free: the one that has
    been cached longest first, or nearly so. Counts are kept, so asking is free.

    Ids that follow each other lie side by side in memory, which is then read faster: by a third on a CPU. So a table
    goes on with the block behind its last one, and begins in a run of `run_size` blocks of which none is taken: until
    none is left, nobody takes what another table's next tokens need. Where much is cached, a table goes on in what has
    been cached for long, too, though others are free; and where none is, it begins with the first of such blocks around
    the one that has been cached longest.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks = {num_blocks}: a pool holds at least 1 block")
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens a block
        self.num_free = num_blocks
        self.num_quarantined = 0
        self.num_moves = 0  # times that blocks came to another state, but from free to in use
        self.num_evicted = 0  # cached blocks that were taken, ever
        self.on_evicted: Callable[[list[int]], object] = _ignore  # told of cached blocks whose contents are given up
        self.state = np.full(num_blocks, FREE, np.int8)  # [N]
        self.num_tables = np.zeros(num_blocks, np.int32)  # [N] that hold the block
        self.run_size = run_size = max(1, RUN_TOKENS // block_size)
        self._run_sizes = [min(run_size, num_blocks - first) for first in range(0, num_blocks, run_size)]  # [R] blocks
        self._num_free_of = self._run_sizes.copy()  # [R] blocks that are free
        self._whole = OrderedDict.fromkeys(reversed(range(len(self._run_sizes))))  # runs: all is free; the last is next
        self._partly: OrderedDict[int, None] = OrderedDict()  # runs: some is free; the first is next
        self._is_kept = np.zeros(num_blocks, np.bool_)  # [N] the contents may be wanted again
        self._cached: OrderedDict[int, None] = OrderedDict()  # longest unused first
        self._cached_at = np.zeros(num_blocks, np.int64)  # [N] by the count below
        self._num_cachings = 0
        self._untold: list[int] = []  # that are evicted for the blocks that are being taken
        self._last_step = np.full(num_blocks, -1, np.int64)  # [N] that may touch it, as far as givers have said
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
        return self.num_blocks - self.num_free - self.num_quarantined - len(self._cached)

    @property
    def num_shared(self) -> int:
        """Blocks in more than one table."""
        return int(np.count_nonzero(self.num_tables > 1))

    def take(self, count: int) -> Ints:
        """`count` blocks, [count], each in use by one table from now on; ids that follow each other where the pool is
        untouched. Ask `num_available` first."""
        return self.take_behind([-1], [count], count)

    def take_behind(self, lasts: Sequence[int], counts: Sequence[int], total: int) -> Ints:
        """`total` blocks likewise: `counts[i]` for a table whose last one is `lasts[i]`, -1 if it has none."""
        assert total <= self.num_available, f"{total} blocks taken of {self.num_available} that can be had"
        taken: list[int] = []
        for last, count in zip(lasts, counts, strict=True):
            until = len(taken) + count
            self._go_on(last + 1, until, taken)
            while len(taken) < until:
                found = self._find_free(until - len(taken))
                self.state[found] = IN_USE
                self.num_free -= len(found)
                self._count_free(int(found[0]) // self.run_size, -len(found))
                taken += found.tolist()
        if self._untold:
            self._tell_evicted()
        assert len(taken) == total, f"{len(taken)} blocks taken where {total} were asked for"
        blocks = np.array(taken, np.intp)
        self.num_tables[blocks] = 1
        return blocks.astype(np.int32)

    def _go_on(self, block: int, until: int, taken: list[int]) -> None:
        """Takes blocks from `block` on, to the end of its run, until so many are taken, or one is somebody's."""
        state, num_free_of, run = self.state, self._num_free_of, block // self.run_size
        while len(taken) < until and block % self.run_size and block < self.num_blocks:
            if state[block] == FREE:
                self.num_free -= 1
                num_free_of[run] -= 1
                if not num_free_of[run]:
                    del self._partly[run]  # it was not whole: the block before is somebody's
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
        """Free blocks of one run, in rising order: so many, or as many as there are."""
        if not self.num_free:
            self._evict_for(count)
        run = next(reversed(self._whole)) if self._whole else next(iter(self._partly))
        first = run * self.run_size
        found: Indices = (self.state[first : first + self.run_size] == FREE).nonzero()[0][:count] + first
        return found

    def _evict_for(self, count: int) -> None:
        """Cached blocks become free for a table that wants so many: of the run of the one that has been cached longest,
        the first of those around it that nobody uses, and that have been cached for long."""
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
        """Whether so much is cached that what was cached of late is not in question."""
        return len(self._cached) >= MANY_RUNS * self.run_size

    def _old_until(self) -> int:
        """Cachings up to this one are of the half that was cached first."""
        oldest = int(self._cached_at[next(iter(self._cached))])
        return (oldest + self._num_cachings) // 2

    def _count_free(self, run: int, num_more: int) -> None:
        """So many more blocks of a run are free."""
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
        """One more table holds each of `blocks`, whose contents were kept: in use, cached or quarantined ones."""
        states = self.state[blocks]
        assert self._is_kept[blocks].all(), f"blocks {blocks.tolist()} shared, not all of them kept"
        for block in blocks[states == CACHED].tolist():
            del self._cached[block]
        self.num_quarantined -= int(np.count_nonzero(states == QUARANTINED))
        self.num_moves += 1
        self.state[blocks] = IN_USE
        self.num_tables[blocks] += 1

    def keep(self, blocks: Ints) -> None:
        """The contents of `blocks`, which are in use, may be wanted again."""
        self._is_kept[blocks] = True

    def forget(self, block: int) -> None:
        """The contents of `block` are not wanted any more."""
        self._is_kept[block] = False
        if self.state[block] == CACHED:
            del self._cached[block]
            self._push(np.array([block], np.int32))

    def give_back(self, blocks: Ints, last_step: int, completed_step: int) -> None:
        """`blocks` are in one table less. Those in none can be had again once every step is done that any giver said
        may touch them."""
        if not len(blocks):
            return
        assert (self.state[blocks] == IN_USE).all(), f"blocks {blocks.tolist()} given back, not all in use"
        self.num_tables[blocks] -= 1
        self._last_step[blocks] = np.maximum(self._last_step[blocks], last_step)
        blocks = blocks[self.num_tables[blocks] == 0]
        is_done = self._last_step[blocks] <= completed_step
        if np.count_nonzero(is_done):
            self._release(blocks[is_done])
            blocks = blocks[~is_done]
        if len(blocks):
            self.num_moves += 1
            self.state[blocks] = QUARANTINED
            self.num_quarantined += len(blocks)
            self._quarantine.append((int(self._last_step[blocks].max()), blocks))

    def settle(self, completed_step: int) -> None:
        """Every step up to `completed_step` is done: what waited for one of them can be had again."""
        if not self._quarantine:
            return
        waiting, self._quarantine = self._quarantine, []
        for last_step, blocks in waiting:
            if last_step > completed_step:
                self._quarantine.append((last_step, blocks))
                continue
            is_due = (self.state[blocks] == QUARANTINED) & (self._last_step[blocks] <= completed_step)
            blocks = blocks[is_due]  # others were shared in the meantime, and perhaps given back again
            self.num_quarantined -= len(blocks)
            self._release(blocks)

    def forget_kept(self) -> int:
        """Nothing that was kept is wanted any more. Returns how many cached blocks that frees."""
        blocks = list(self._cached)
        self._cached.clear()
        self._is_kept[:] = False
        self._push(np.array(blocks, np.int32))
        return len(blocks)

    def seize_all(self, last_step: int) -> None:
        """Takes every block from everybody; all are free once step `last_step` is done. For a reset after a crash."""
        self._cached.clear()
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
        """To the cache those that are kept: the last of a table as the first to go, for without it the others are
        still of use, and it is of none without them."""
        is_kept = self._is_kept[blocks]
        if np.count_nonzero(is_kept):
            self.num_moves += 1
            kept = blocks[is_kept]
            self.state[kept] = CACHED
            self._num_cachings += 1
            self._cached_at[kept] = self._num_cachings
            self._cached.update(dict.fromkeys(kept[::-1].tolist()))
            blocks = blocks[~is_kept]
        self._push(blocks)

    def _evict(self, evicted: list[int]) -> None:
        """These cached blocks are free, which is told when all is taken that they are free for."""
        for block in evicted:
            del self._cached[block]
        blocks = np.array(evicted, np.int32)
        self._is_kept[blocks] = False
        self._push(blocks)
        self._untold += evicted

    def _tell_evicted(self) -> None:
        evicted, self._untold = self._untold, []
        self.num_evicted += len(evicted)
        self.on_evicted(evicted)

    def _push(self, blocks: Ints) -> None:
        self.num_moves += 1
        self.state[blocks] = FREE
        self.num_free += len(blocks)
        for run, count in Counter((blocks // self.run_size).tolist()).items():
            self._count_free(run, count)

    def kept(self) -> set[int]:
        """Blocks whose contents may be wanted again."""
        return set(self._is_kept.nonzero()[0].tolist())

    def check(self) -> None:
        """Raises AssertionError unless the counts, the states and the runs tell the same story (I3, I4)."""
        counted = np.bincount(self.state, minlength=len(BlockState))
        told = [self.num_free, self.num_in_use, self.num_cached, self.num_quarantined]
        assert counted.tolist() == told, f"blocks by state are {counted.tolist()}, the counters say {told}"
        firsts = np.arange(0, self.num_blocks, self.run_size)
        num_free_of = np.add.reduceat(self.state == FREE, firsts, dtype=np.int64).tolist()
        assert num_free_of == self._num_free_of, f"blocks free by run are {num_free_of}, told {self._num_free_of}"
        whole = {run for run, count in enumerate(num_free_of) if count == self._run_sizes[run]}
        partly = {run for run, count in enumerate(num_free_of) if 0 < count < self._run_sizes[run]}
        assert whole == set(self._whole) and partly == set(self._partly), "a run is not where its free blocks put it"
        is_used = self.state == IN_USE
        assert ((self.num_tables > 0) == is_used).all(), "a block is in use by no table, or in a table and not in use"
        if self._cached:
            cached = np.array(list(self._cached), np.int64)
            assert (self.state[cached] == CACHED).all(), "a block among the cached ones is not cached"
            assert self._is_kept[cached].all(), "a block is cached whose contents nobody wants"
        if self.num_quarantined:
            is_waiting = np.zeros(self.num_blocks, np.bool_)
            for _, blocks in self._quarantine:
                is_waiting[blocks] = True
            assert is_waiting[self.state == QUARANTINED].all(), "a quarantined block waits for no step"


def _ignore(blocks: list[int]) -> None:
    pass


class BlockTables:
    """Where sequences' keys and values live: token `i` of slot `s` is in block `blocks[s, i // block_size]`.

    Columnar: one row per slot, so that a step of 256 sequences is a few numpy operations and no loop.
    """

    def __init__(self, num_slots: int, blocks_per_slot: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = np.zeros((num_slots, blocks_per_slot), np.int32)  # [S, M] block ids, in token order
        self.room = np.zeros(num_slots, np.int32)  # [S] tokens that the blocks of a slot hold
        self.num_tokens = np.zeros(num_slots, np.int32)  # [S] tokens with a place; the last block may be partly filled

    @property
    def num_blocks(self) -> Ints:
        """[S] entries of `blocks` that count."""
        return self.room // self.block_size

    def num_blocks_for(self, num_tokens: Ints) -> Ints:
        """Blocks that hold `num_tokens` tokens, elementwise."""
        return -(-num_tokens // self.block_size)

    def lasts(self, slots: Indices) -> list[int]:
        """The last block of each slot; -1 of one that has none."""
        places = self.room[slots] // self.block_size - 1
        lasts: list[int] = np.where(places < 0, -1, self.blocks[slots, places]).tolist()
        return lasts

    def append(self, slots: Indices, counts: Ints, blocks: Ints) -> tuple[Indices, Indices]:
        """Adds `counts[i]` of `blocks`, in order, to the table of `slots[i]`. Returns (slot, place) of each, [B]."""
        if len(blocks) == len(slots):  # one each, as when decoding
            owners, places = slots, (self.room[slots] // self.block_size).astype(np.intp)
        else:
            owners = np.repeat(slots, counts)
            places = self.num_blocks[owners] + np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.blocks[owners, places] = blocks
        self.room[slots] += counts * self.block_size
        return owners, places

    @property
    def waste(self) -> float:
        """The share of running sequences' room that holds no token: the rest of their last blocks. 0 if none run."""
        room = int(self.room.sum())
        return 1.0 - int(self.num_tokens.sum()) / room if room else 0.0

    def clear(self, slot: int) -> Ints:
        """Empties the table of `slot`. Returns the blocks it held."""
        held = self.blocks[slot, : self.room[slot] // self.block_size].copy()
        self.room[slot] = self.num_tokens[slot] = 0
        return held

    def clear_all(self) -> None:
        """Empties every table."""
        self.room[:] = self.num_tokens[:] = 0

    def held(self) -> Ints:
        """The blocks of all tables, one after another."""
        columns = np.arange(self.blocks.shape[1])
        return self.blocks[columns < self.num_blocks[:, None]]
