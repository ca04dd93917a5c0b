"""Which engines have the blocks of a prompt in their prefix caches.

A hint: an entry that is wrong or missing costs time, and never an answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence


class PrefixIndex:
    """From the key of a block to the engines that hold it: those that told so, and those expected to soon.

    Engines have small whole numbers, which are bits of a mask. A key stands for its block and all before it.
    """

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}  # key -> mask of engines
        self._expected: dict[bytes, tuple[int, float]] = {}  # key -> (mask of engines, until when)
        self._expiring: deque[tuple[float, Sequence[bytes]]] = deque()  # in order of time

    def __len__(self) -> int:
        """The number of keys that some engine holds."""
        return len(self._holders)

    def add(self, engine: int, keys: Iterable[bytes]) -> None:
        """The engine has these blocks now."""
        holders, bit = self._holders, 1 << engine
        for key in keys:
            holders[key] = holders.get(key, 0) | bit

    def remove(self, engine: int, keys: Iterable[bytes]) -> None:
        """The engine has these blocks no longer."""
        holders, others = self._holders, ~(1 << engine)
        for key in keys:
            if left := holders.get(key, 0) & others:
                holders[key] = left
            else:
                holders.pop(key, None)

    def drop(self, engine: int) -> None:
        """The engine is gone, with all that it held and was to hold."""
        others = ~(1 << engine)
        self._holders = {key: left for key, mask in self._holders.items() if (left := mask & others)}
        self._expected = {
            key: (left, until_s) for key, (mask, until_s) in self._expected.items() if (left := mask & others)
        }

    def held_by(self, engine: int) -> set[bytes]:
        """The keys of the blocks that the engine told of."""
        return {key for key, mask in self._holders.items() if mask >> engine & 1}

    def expect(self, engine: int, keys: Sequence[bytes], now_s: float, until_s: float) -> None:
        """A prompt with these blocks is sent to the engine: count them as there until `until_s`.

        So a burst of requests with one prompt stays together, before the first of them is computed. Call with times
        that do not decrease.
        """
        self._forget_expected(now_s)
        expected, bit = self._expected, 1 << engine
        first = bit, until_s  # of all keys that were not expected anywhere
        for key in keys:
            known = expected.get(key)
            expected[key] = first if known is None else (known[0] | bit, max(until_s, known[1]))
        self._expiring.append((until_s, keys))

    def _forget_expected(self, now_s: float) -> None:
        while self._expiring and self._expiring[0][0] <= now_s:
            expected = self._expected
            for key in self._expiring.popleft()[1]:
                known = expected.get(key)
                if known is not None and known[1] <= now_s:
                    del expected[key]

    def runs(self, keys: Sequence[bytes], engines: Iterable[int], now_s: float) -> dict[int, int]:
        """For each of the engines, how many of the first blocks it has, or is expected to have."""
        runs = dict.fromkeys(engines, 0)
        alive = 0
        for engine in runs if keys else ():
            alive |= 1 << engine
        find_holders, find_expected = self._holders.get, self._expected.get
        for place, key in enumerate(keys):
            mask = find_holders(key, 0)
            if mask & alive != alive:
                expected, until_s = find_expected(key, _NEVER)
                if until_s > now_s:
                    mask |= expected
            if gone := alive & ~mask:
                while gone and place:
                    runs[(lowest := gone & -gone).bit_length() - 1] = place
                    gone ^= lowest
                alive &= mask
                if not alive:
                    break
        runs.update(dict.fromkeys(_bits(alive), len(keys)))
        return runs


_NEVER = (0, float("-inf"))


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
