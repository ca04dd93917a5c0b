"""Rows of logits in blocks, whose maxima and sums say where to look: numpy arrays or torch tensors on any device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..device.arrays import Array, arrays_of

Longs = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]

BLOCK = 128  # tokens; small enough to read twice, large enough to reduce whole vectors


class LogitTiles:
    """Rows of V numbers split into blocks of 128, the last one shorter. Not KV blocks.

    Reducing blocks reads a row once at memory speed; only a few blocks are then read again. On a CPU, finding the index
    of a maximum in this way takes 0.4 ns an entry, `torch.argmax` 6.
    """

    def __init__(self, x: Array) -> None:
        num_whole = x.shape[1] // BLOCK
        self._arrays = arrays_of(x)
        self._rows = x
        self._head = x[:, : num_whole * BLOCK].reshape(len(x), num_whole, BLOCK)
        self._tail = x[:, None, num_whole * BLOCK :]

    @cached_property
    def maxima(self) -> Floats:
        """The largest number of each block, [N, ceil(V / 128)]. NaN where a block holds one."""
        return self._arrays.on_host(self._arrays.floats(self._reduced(self._arrays.maxima)))

    def sums(self) -> Doubles:
        """The sum of each block, [N, ceil(V / 128)]. The order of summation is fixed."""
        sums: Doubles = self._arrays.on_host(self._reduced(self._arrays.sums)).astype(np.float64)
        return sums

    def _reduced(self, reduce: Callable[[Array], Array]) -> Array:
        if not self._tail.shape[2]:
            return reduce(self._head)
        tail = reduce(self._tail)
        return self._arrays.join(reduce(self._head), tail) if self._head.shape[1] else tail

    def take(self, rows: Longs, blocks: Longs) -> Floats:
        """Block `blocks[i]` of row `rows[i]`, [n, 128]; -inf past the end of the vocabulary."""
        is_whole = blocks < self._head.shape[1]
        if is_whole.all():
            return self._arrays.pick(self._head, rows, blocks)
        found = np.full((len(rows), BLOCK), -np.inf, np.float32)
        found[is_whole] = self.take(rows[is_whole], blocks[is_whole])
        tail = self._arrays.pick(self._tail, rows[~is_whole], np.zeros(np.count_nonzero(~is_whole), np.int64))
        found[~is_whole, : tail.shape[1]] = tail
        return found

    def likeliest(self) -> tuple[Longs, Floats]:
        """The likeliest token of each row, the lowest id among equals, and its logit.

        The logit is NaN where a row holds one.
        """
        rows = np.arange(len(self._rows))
        if isinstance(self._rows, np.ndarray):  # numpy's argmax, unlike torch's, is fast
            ids: Longs = self._rows.argmax(1)
            return ids, self._rows[rows, ids]
        blocks = self.maxima.argmax(1)
        token_ids: Longs = blocks * BLOCK + self.take(rows, blocks).argmax(1)
        return token_ids, self.maxima[rows, blocks]

    def clear(self, rows: Bools) -> None:
        """Sets these rows to zero."""
        self._rows[self._arrays.beside(self._rows, rows)] = 0.0
        if "maxima" in self.__dict__:
            self.maxima[rows] = 0.0


def rows_of(x: Array, rows: Longs) -> Array:
    """These rows of `x`, which must ascend; `x` itself if that is all of them."""
    return x if len(rows) == len(x) else arrays_of(x).take(x, rows)
