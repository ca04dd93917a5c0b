"""The cached blocks of one kind beside kind 0, in the prefix cache of a model with several kinds of memory.

An entry of the prefix cache is found by its block of kind 0, on the device or the host, and names its tokens. Here are
the blocks of another kind that hold the keys of the same tokens, by the entry's number. An entry may lack one: the
blocks that a window has passed are evicted first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...kernels.layout.kv_layout import KVKind
from .tiers.block_pool import BlockPool
from .tiers.plan_in_hand import KindMatch


@dataclass(slots=True)
class _Run:
    """The blocks of a kind that end at some place of a chain without a gap: first on the device, then on the host."""

    length: int = 0
    is_on_host: bool = False  # whether the last one is there

    def add(self, index: KindIndex, number: int) -> None:
        if number in index.blocks:
            self.length = 1 if self.is_on_host else self.length + 1
            self.is_on_host = False
        elif number in index.places:
            self.length += 1
            self.is_on_host = True
        else:
            self.length, self.is_on_host = 0, False


class KindIndex:
    """The cached blocks of one kind. `pool` and `host_pool` learn of blocks whose entry is gone."""

    def __init__(self, kind: KVKind, block_size: int, pool: BlockPool, host_pool: BlockPool | None = None):
        self._kind, self._block_size = kind, block_size
        self.blocks: dict[int, int] = {}  # number of an entry -> device block
        self.places: dict[int, int] = {}  # number of an entry -> host block
        self.tails: dict[int, int] = {}  # tail of kind 0 -> the device block of the same tokens
        self._number_of: dict[int, int] = {}  # device block -> number
        self._number_at: dict[int, int] = {}  # host block -> number
        self._tail_of: dict[int, int] = {}  # device block -> tail of kind 0
        self._samples: set[int] = set()  # device blocks of sampled sequences: see `offload_policy.py`
        self._pool, self._host_pool = pool, host_pool

    # -- lookup

    def firsts_seen(self, count: int) -> list[int]:
        """The first place that a query sees which follows n whole blocks, for n from 0 to `count`."""
        firsts: list[int] = (
            self._kind.first_key(np.arange(count + 1, dtype=np.int32) * self._block_size) // self._block_size
        ).tolist()
        return firsts

    def match(self, numbers: Sequence[int], source: int | None) -> KindMatch:
        """The blocks that a sequence needs which starts after the entries with these numbers, all of which are here."""
        first = self.firsts_seen(len(numbers))[-1]
        seen = numbers[first:]
        shared = [self.blocks[number] for number in seen if number in self.blocks]
        on_host = [self.places[number] for number in seen[len(shared) :]]
        return KindMatch(first, np.array(shared, np.int32), np.array(on_host, np.int32), source)

    def may_move_out(self, block: int, *, samples_only: bool) -> bool:
        """Whether an evicted block is worth a copy on the host: it has none, and sequences may start behind it."""
        number = self._number_of.get(block)
        if number is None or number in self.places or self._pool.is_passed(block):
            return False
        return not samples_only or block in self._samples

    # -- adding

    def put(self, number: int, block: int, *, is_sample: bool = False) -> bool:
        """Adds a device block, in use or quarantined, unless the entry has one on the device.

        Returns whether it did; the caller then marks the block as kept.
        """
        if number in self.blocks or block in self._number_of:
            return False
        if block in self._tail_of:
            self._drop_tail_of(block)
        self.blocks[number], self._number_of[block] = block, number
        if is_sample:
            self._samples.add(block)
        return True

    def put_tail(self, tail: int, block: int) -> None:
        """Adds the device block of the tokens of `tail`, a block of kind 0."""
        self.drop_tail(tail)
        self._drop_tail_of(block)
        self.tails[tail], self._tail_of[block] = block, tail
        self._pool.keep(np.array([block], np.int32))

    def move_out(self, block: int, place: int) -> None:
        """Moves a device block's entry to host block `place`. The pool has evicted the block."""
        number = self._number_of.pop(block)
        del self.blocks[number]
        self._samples.discard(block)
        self.forget_number_on_host(number)
        self.places[number], self._number_at[place] = place, number

    # -- removing

    def evict(self, block: int) -> int | None:
        """The pool has evicted a device block. Returns the tail that has lost its tokens' block, if any."""
        number = self._number_of.pop(block, None)
        if number is not None:
            del self.blocks[number]
            self._samples.discard(block)
            return None
        tail = self._tail_of.pop(block, None)
        if tail is not None:
            del self.tails[tail]
        return tail

    def forget_number(self, number: int) -> None:
        """The entry is known nowhere: no sequence can find its blocks."""
        block = self.blocks.pop(number, None)
        if block is not None:
            del self._number_of[block]
            self._samples.discard(block)
            self._pool.forget(block)
        self.forget_number_on_host(number)

    def forget_number_on_host(self, number: int) -> None:
        """Removes the host block of an entry, if it has one."""
        place = self.places.pop(number, None)
        if place is not None:
            assert self._host_pool is not None
            del self._number_at[place]
            self._host_pool.forget(place)

    def forget_on_host(self, place: int) -> None:
        """The host's pool has evicted block `place`, or it was never written."""
        number = self._number_at.pop(place, None)
        if number is not None:
            del self.places[number]

    def drop_tail(self, tail: int) -> None:
        """Removes the block of `tail`, which is no tail any more."""
        block = self.tails.pop(tail, None)
        if block is not None:
            del self._tail_of[block]
            self._pool.forget(block)

    def _drop_tail_of(self, block: int) -> None:
        tail = self._tail_of.pop(block, None)
        if tail is not None:
            del self.tails[tail]

    def clear(self) -> None:
        """Removes all blocks. The pools are told by the caller."""
        for each in (self.blocks, self.places, self.tails, self._number_of, self._number_at, self._tail_of):
            each.clear()
        self._samples.clear()

    def check(self, numbers: set[int], tails: set[int]) -> None:
        """Raises AssertionError unless each block is of a living entry or tail, and kept by its pool (I11, K3)."""
        assert self.blocks.keys() <= numbers and self.places.keys() <= numbers, "a block is of no entry"
        assert self.tails.keys() <= tails, "a block is of no tail"
        assert {block: number for number, block in self.blocks.items()} == self._number_of
        assert {place: number for number, place in self.places.items()} == self._number_at
        assert {block: tail for tail, block in self.tails.items()} == self._tail_of
        assert not self._number_of.keys() & self._tail_of.keys(), "a block is known whole and as a tail"
        assert self._pool.kept() == self._number_of.keys() | self._tail_of.keys(), "the pool keeps other blocks"
        if self._host_pool is not None:
            assert self._host_pool.kept() == set(self._number_at), "the host's pool keeps other blocks"


def num_usable(kinds: Sequence[KindIndex], numbers: Sequence[int]) -> int:
    """The most first entries of a chain after which every kind has the blocks that the next query sees.

    One pass: the blocks that end at each place without a gap are counted on the way.
    """
    runs, usable = [(_Run(), index, index.firsts_seen(len(numbers))) for index in kinds], 0
    for place, number in enumerate(numbers, 1):
        is_there = True
        for run, index, firsts in runs:
            run.add(index, number)
            is_there = is_there and run.length >= place - firsts[place]
        if is_there:
            usable = place
    return usable
