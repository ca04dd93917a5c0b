"""Blocks of the KV cache: which are free, who holds which, and when a freed one may be used again.

Knows block ids and steps. Refuses to know sequences, policy or tensors.
"""

from __future__ import annotations

import enum

import numpy as np

from .messages import Indices, Ints


class BlockState(enum.IntEnum):
    """Every block is in exactly one of these."""

    FREE = 0
    IN_USE = 1  # in a table
    CACHED = 2  # in no table, but its contents may be wanted again; taken when free ones run out
    QUARANTINED = 3  # given back while steps in flight may still touch it


class BlockPool:
    """The ids [0, num_blocks) and the state of each.

    A block given back is quarantined until every step that might still read or write it is done: `give_back` names the
    last such step, and `settle` says how far the device has come. Counts are kept, so asking is free.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks = {num_blocks}: a pool holds at least 1 block")
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens a block
        self.num_free = num_blocks
        self.num_quarantined = 0
        self.num_cached = 0
        self.state = np.full(num_blocks, BlockState.FREE, np.int8)  # [N]
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # a stack of `num_free`, its top at the end
        self._quarantine: list[tuple[int, Ints]] = []  # (last step that may touch them, blocks)

    @property
    def num_in_use(self) -> int:
        """Blocks in tables."""
        return self.num_blocks - self.num_free - self.num_quarantined - self.num_cached

    def take(self, count: int) -> Ints:
        """`count` free blocks, [count], in use from now on; ids that follow each other where the pool is untouched. Ask
        `num_free` first."""
        assert count <= self.num_free, f"{count} blocks taken of {self.num_free} free ones"
        rest = self.num_free - count
        blocks = self._free[rest : self.num_free][::-1].copy()
        self.num_free = rest
        self.state[blocks] = BlockState.IN_USE
        return blocks

    def give_back(self, blocks: Ints, last_step: int, completed_step: int) -> None:
        """`blocks` are in no table any more. They are free once step `last_step` is done."""
        if not len(blocks):
            return
        assert (self.state[blocks] == BlockState.IN_USE).all(), f"blocks {blocks.tolist()} given back, not all in use"
        if last_step <= completed_step:
            self._release(blocks)
            return
        self.state[blocks] = BlockState.QUARANTINED
        self.num_quarantined += len(blocks)
        self._quarantine.append((last_step, blocks))

    def settle(self, completed_step: int) -> None:
        """Every step up to `completed_step` is done: what waited for one of them is free."""
        waiting, self._quarantine = self._quarantine, []
        for last_step, blocks in waiting:
            if last_step > completed_step:
                self._quarantine.append((last_step, blocks))
                continue
            self.num_quarantined -= len(blocks)
            self._release(blocks)

    def seize_all(self, last_step: int) -> None:
        """Takes every block from everybody; all are free once step `last_step` is done. For a reset after a crash."""
        self.state[:] = BlockState.QUARANTINED
        self.num_free = self.num_cached = 0
        self.num_quarantined = self.num_blocks
        self._quarantine = [(last_step, np.arange(self.num_blocks, dtype=np.int32))]

    def _release(self, blocks: Ints) -> None:
        self.state[blocks] = BlockState.FREE
        self._free[self.num_free : self.num_free + len(blocks)] = blocks[::-1]
        self.num_free += len(blocks)

    def check(self) -> None:
        """Raises AssertionError unless the counts, the states and the stacks tell the same story (I3, I4)."""
        counted = np.bincount(self.state, minlength=len(BlockState))
        told = [self.num_free, self.num_in_use, self.num_cached, self.num_quarantined]
        assert counted.tolist() == told, f"blocks by state are {counted.tolist()}, the counters say {told}"
        free = self._free[: self.num_free]
        assert len(np.unique(free)) == self.num_free, "a block is on the free stack twice"
        assert (self.state[free] == BlockState.FREE).all(), "a block on the free stack is not free"
        waiting = [block for _, blocks in self._quarantine for block in blocks.tolist()]
        assert len(set(waiting)) == len(waiting) == self.num_quarantined, "a block is quarantined twice"


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
