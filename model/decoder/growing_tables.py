"""Rotary tables whose rows are computed when a sequence first comes so far. No torch.

The tables of 32,768 positions take 64 MiB for Gemma 3 270M, and most servers use few of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from ..rope_config import RopeConfig
from .rope import Floats, rope_tables, short_length

ROWS = 1024  # computed at a time: 4 ms for two tables of 128 pairs, on the thread that first needs one of them


class GrowingTables:
    """As `decoder_tables`: cos and sin of each kind, [short_length + num_positions, rope.dim / 2] f32.

    Rows that are not computed yet are zero and take no memory. The arrays stay where they are. Thread-safe.
    """

    def __init__(self, ropes: Sequence[RopeConfig], num_positions: int) -> None:
        self._ropes, self._num_positions, self._lock = ropes, num_positions, threading.Lock()
        self._num_short = short_length(ropes, num_positions)
        sizes = [(self._num_short + num_positions, rope.dim // 2) for rope in ropes]
        self.tables = [(np.zeros(size, np.float32), np.zeros(size, np.float32)) for size in sizes]
        self.num_ready = 0  # positions that sequences may have
        for rope, pair in zip(ropes, self.tables, strict=True):
            _fill(pair, 0, rope_tables(rope, self._num_short))
        self.grow(1)

    def grow(self, num_positions: int) -> None:
        """Makes the rows of the positions below `num_positions` ready, and some more."""
        if num_positions <= self.num_ready:
            return
        with self._lock:
            first, last = self.num_ready, min(-(-num_positions // ROWS) * ROWS, self._num_positions)
            if first >= last:
                return
            for rope, pair in zip(self._ropes, self.tables, strict=True):
                rows = rope_tables(rope, last, is_long=self._num_short > 0, first=first)
                _fill(pair, self._num_short + first, rows)
            self.num_ready = last


def _fill(pair: tuple[Floats, Floats], first: int, rows: tuple[Floats, Floats]) -> None:
    for table, some in zip(pair, rows, strict=True):
        table[first : first + len(some)] = some
