"""Blocks of the KV cache: which are free, who holds which, and when a freed one may be used again.

Knows block ids and steps. Refuses to know sequences, policy or tensors.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from .messages import Indices, Ints


class BlockState(enum.IntEnum):
    """Every block is in exactly one of these."""

    FREE = 0
    IN_USE = 1  # in one table or more
    CACHED = 2  # in no table, but its contents may be wanted again; taken when free ones run out
    QUARANTINED = 3  # in no table, while steps in flight may still touch it


# Plain numbers: numpy looks for an `__array_ufunc__` of an enum's member each time it meets one, and that takes long.
FREE, IN_USE, CACHED, QUARANTINED = (int(state) for state in BlockState)


class BlockPool:
    """The ids [0, num_blocks), the state of each, and how many tables hold it.

    A block that the last table gives back is quarantined until every step that might still read or write it is done:
    `give_back` names the last such step, and `settle` says how far the device has come. Then it is free; or, if `keep`
    said that its contents may be wanted again, cached, until it is taken because no other is free: the one that has
    been cached longest first. Counts are kept, so asking is free.
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
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # a stack of `num_free`, its top at the end
        self._is_kept = np.zeros(num_blocks, np.bool_)  # [N] the contents may be wanted again
        self._cached: OrderedDict[int, None] = OrderedDict()  # longest unused first
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
        if count > self.num_free:
            assert count <= self.num_available, f"{count} blocks taken of {self.num_available} that can be had"
            self._evict(count - self.num_free)
        rest = self.num_free - count
        blocks = self._free[rest : self.num_free][::-1].copy()
        self.num_free = rest
        places = blocks.astype(np.intp)  # numpy converts other numbers each time it indexes, which takes 1 us
        self.state[places] = IN_USE
        self.num_tables[places] = 1
        return blocks

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
            self._cached.update(dict.fromkeys(kept[::-1].tolist()))
            blocks = blocks[~is_kept]
        self._push(blocks)

    def _evict(self, count: int) -> None:
        evicted = [self._cached.popitem(last=False)[0] for _ in range(count)]
        self.num_evicted += count
        blocks = np.array(evicted, np.int32)
        self._is_kept[blocks] = False
        self._push(blocks)
        self.on_evicted(evicted)

    def _push(self, blocks: Ints) -> None:
        self.num_moves += 1
        self.state[blocks] = FREE
        self._free[self.num_free : self.num_free + len(blocks)] = blocks[::-1]
        self.num_free += len(blocks)

    def kept(self) -> set[int]:
        """Blocks whose contents may be wanted again."""
        return set(self._is_kept.nonzero()[0].tolist())

    def check(self) -> None:
        """Raises AssertionError unless the counts, the states and the stacks tell the same story (I3, I4)."""
        counted = np.bincount(self.state, minlength=len(BlockState))
        told = [self.num_free, self.num_in_use, self.num_cached, self.num_quarantined]
        assert counted.tolist() == told, f"blocks by state are {counted.tolist()}, the counters say {told}"
        num_times_free = np.bincount(self._free[: self.num_free], minlength=self.num_blocks)
        wrong = (num_times_free != (self.state == FREE)).nonzero()[0]
        assert not len(wrong), f"blocks {wrong.tolist()} are not on the free stack once and free, or neither"
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
