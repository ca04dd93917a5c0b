"""The snapshots of recurrent states in the prefix cache, which are found by the numbers of its entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...kernels.layout.state_layout import StateLayout
from ..messages import Ints
from .partial_blocks import TOKEN_BYTES, Before

SNAPSHOT_TOKENS = 2048  # between two snapshots of a long prompt; a step ends at each


class EndOfAnswer(NamedTuple):
    """Where a sequence has ended within a block: a tail of the cache, which is copied to go on behind it."""

    before: Before  # of the tail's block
    tokens: bytes  # of the tail, i32 each


SnapshotKey = int | EndOfAnswer  # the number of the entry before a snapshot, or the end of an answer


class StateSnapshots:
    """The snapshots of recurrent states, in the places behind those of slots: where a sequence can go on.

    A snapshot is named by the number of the entry before it, so by exactly the tokens that the state has read. It is
    taken by a step that ends there, and is known once that step is done: a step that breaks off has changed its states.
    The least recently used one is replaced first. At the end of an answer it may be named by a tail: see `EndOfAnswer`.

    Copies run in the order of their grants, so a place is free at once: what a step reads from it was read before a
    later step writes there.
    """

    def __init__(self, layout: StateLayout, block_size: int) -> None:
        self.num_hits = 0  # sequences that went on from one
        self._block_size = block_size
        self._every = -(-SNAPSHOT_TOKENS // block_size) * block_size
        self._first, self._num = layout.num_slots, layout.num_snapshots
        self._free = list(range(self._first + self._num - 1, self._first - 1, -1))
        self._cached: OrderedDict[SnapshotKey, int] = OrderedDict()  # -> place; the least recent first
        self._used: set[SnapshotKey] = set()  # those from which a sequence has gone on
        self._tails: dict[int, EndOfAnswer] = {}  # by the block of the tail
        self._block_of: dict[EndOfAnswer, int] = {}  # the reverse
        self.lost_tails: list[int] = []  # blocks of tails whose snapshots were replaced; the publisher drops them
        self._arriving: set[int] = set()  # places that granted steps write

    def __len__(self) -> int:
        """Snapshots from which sequences can go on."""
        return len(self._cached)

    # -- lookup

    def num_usable(self, numbers: Sequence[int]) -> int:
        """The most first entries of a chain with a snapshot behind them."""
        return next((count for count in range(len(numbers), 0, -1) if numbers[count - 1] in self._cached), 0)

    def place(self, key: SnapshotKey) -> int:
        """The place of the snapshot of this name, which is used now."""
        self._cached.move_to_end(key)
        self._used.add(key)
        return self._cached[key]

    def tail(self, before: Before, tokens: bytes) -> EndOfAnswer | None:
        """The longest end of an answer behind `before` that has a snapshot, and tokens with which `tokens` begin."""
        if not self._tails:
            return None
        ends = (EndOfAnswer(before, tokens[:end]) for end in range(len(tokens), 0, -TOKEN_BYTES))
        return next((end for end in ends if end in self._cached), None)

    def block_of(self, end: EndOfAnswer) -> int:
        """The block of the tail at the end of an answer that has a snapshot."""
        return self._block_of[end]

    def __contains__(self, key: SnapshotKey) -> bool:
        return key in self._cached

    # -- taking

    def cut(self, starts: Ints, granted: Ints, num_known: Ints) -> Ints:
        """`granted` [R] tokens, or fewer where a row from `starts` on would pass the position of a snapshot.

        `num_known` [R] are the tokens with which the rows' sequences started. Returns `granted` itself if none is cut.
        """
        last = (num_known - 1) // self._block_size * self._block_size
        stops = np.minimum((starts // self._every + 1) * self._every, last)
        found: Ints = np.where(starts < stops, np.minimum(granted, stops - starts), granted).astype(granted.dtype)
        return granted if np.array_equal(found, granted) else found

    def is_due(self, end: int, num_known: int) -> bool:
        """Whether a step that ends at `end` takes a snapshot of a sequence that started with `num_known` tokens."""
        last = (num_known - 1) // self._block_size * self._block_size
        return 0 < end <= last and (end == last or end % self._every == 0)

    def take(self) -> int | None:
        """A place that a granted step writes; None if steps in flight write all of them."""
        if not self._free:
            if not self._cached:
                return None
            key, place = self._cached.popitem(last=False)
            self._used.discard(key)
            self._free.append(place)
            if isinstance(key, EndOfAnswer):
                block = self._block_of.pop(key)
                del self._tails[block]
                self.lost_tails.append(block)
        place = self._free.pop()
        self._arriving.add(place)
        return place

    def publish(self, place: int, key: SnapshotKey, tail: int | None = None) -> None:
        """The step that writes `place` is done: it holds the state behind `key`. Of two such the first is kept.

        `tail` is the block of the tail, at the end of an answer.
        """
        if key in self._cached:
            return self.give_back(place)
        self._arriving.remove(place)
        self._cached[key] = place
        if tail is not None:
            assert isinstance(key, EndOfAnswer)
            self._tails[tail], self._block_of[key] = key, tail

    def drop_tail(self, block: int) -> None:
        """The cache has dropped a tail: the snapshot behind it is of no use."""
        end = self._tails.pop(block, None)
        if end is not None:
            del self._block_of[end]
            self._used.discard(end)
            self._free.append(self._cached.pop(end))

    def pass_by(self, key: SnapshotKey) -> None:
        """One behind the answer follows: this one is replaced first, unless a sequence has gone on from it."""
        if key in self._cached and key not in self._used:
            self._cached.move_to_end(key, last=False)

    def give_back(self, place: int) -> None:
        """The step that writes `place` is over, and what it holds is of no use."""
        self._arriving.remove(place)
        self._free.append(place)

    # -- forgetting

    def clear(self) -> None:
        """Forgets all snapshots but those that steps in flight write."""
        self._free.extend(self._cached.values())
        self._cached.clear()
        self._used.clear()
        self._tails.clear()
        self._block_of.clear()
        self.lost_tails.clear()

    def drop_all(self) -> None:
        """After a crash: forgets all, also those that steps in flight write."""
        self.clear()
        self._free.extend(sorted(self._arriving))
        self._arriving.clear()

    def check(self) -> None:
        """Raises AssertionError unless each place is in one state."""
        places = sorted([*self._free, *self._cached.values(), *self._arriving])
        assert places == list(range(self._first, self._first + self._num)), f"snapshots are at {places}"
        ends = {key for key in self._cached if isinstance(key, EndOfAnswer)}
        assert self._used <= self._cached.keys(), "a snapshot that is gone counts as used"
        is_right = ends == set(self._tails.values()) == set(self._block_of)
        assert is_right, "a snapshot at the end of an answer has no tail, or the reverse"
