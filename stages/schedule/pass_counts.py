"""How many sequences were admitted past each one that waits for its adapter.

Plain code behind `adapter_lines.py`.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Any

import numpy as np

from .sequence import Sequence

Key = tuple[tuple[Any, ...], int]  # (rank in the waiting queue, sequence id): lower is served first


class PassCounts:
    """The waiting sequences by rank, each with the number of sequences behind it that were admitted meanwhile.

    A count is never less than that of a sequence behind it: a sequence that joins ahead of others takes over their
    count. So the counts say who is to be served first, and the first sequences are those past which most were admitted.
    """

    def __init__(self) -> None:
        self._keys: list[Key] = []  # sorted
        self._sequences: list[Sequence] = []  # in the same order
        self._counts = np.zeros(0, np.int64)  # in the same order; they never increase along it

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, sequence: Sequence, key: Key) -> None:
        """Adds a sequence with the count that it had when it waited last, `num_passes`."""
        place = bisect.bisect_left(self._keys, key)
        count = max([sequence.num_passes, *self._counts[place : place + 1].tolist()])
        self._keys.insert(place, key)
        self._sequences.insert(place, sequence)
        self._counts = np.insert(self._counts, place, count)
        np.maximum(self._counts[:place], count, out=self._counts[:place])

    def remove(self, key: Key) -> None:
        """Removes a sequence, and sets its `num_passes`."""
        place = bisect.bisect_left(self._keys, key)
        assert self._keys[place] == key, f"sequence {key[1]} does not wait for its adapter"
        del self._keys[place]
        self._sequences.pop(place).num_passes = int(self._counts[place])
        self._counts = np.delete(self._counts, place)

    def note_admitted(self, key: Key) -> None:
        """A sequence was admitted, past all that rank before it."""
        self._counts[: bisect.bisect_left(self._keys, key)] += 1

    def num_past(self, num_passes: float) -> int:
        """The sequences past which at least so many were admitted."""
        return int(np.count_nonzero(self._counts >= num_passes))

    def most_passed(self, num_passes: float) -> Iterator[tuple[Key, Sequence]]:
        """The sequences past which at least so many were admitted, by rank."""
        most = self.num_past(num_passes)
        return zip(self._keys[:most], self._sequences[:most], strict=True)
