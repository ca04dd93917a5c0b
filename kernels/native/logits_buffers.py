"""Memory for the logits of each step, which are large and soon forgotten."""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

NUM_KEPT = 2  # who asked for the logits of a step may hold them while the next one computes
UNHELD = 2  # references to memory of which nothing is held: the list's, and that of who counts


class ReusedRows:
    """Gives out arrays [rows, columns] of float32, not initialized: of memory given out before, if nobody holds any of
    it any more.

    New memory would come from the system each time, at 512 rows of 49,152 a 25th of the step.
    """

    def __init__(self, num_columns: int) -> None:
        self.num_columns = num_columns
        self._kept: list[NDArray[np.float32]] = []

    def take(self, num_rows: int) -> NDArray[np.float32]:
        size = num_rows * self.num_columns
        for place in range(len(self._kept)):
            if sys.getrefcount(self._kept[place]) == UNHELD:
                if self._kept[place].size >= size:
                    return self._shaped(self._kept[place], num_rows)
                del self._kept[place]  # too small for what comes now
                break
        self._kept = [np.empty(size, np.float32), *self._kept[: NUM_KEPT - 1]]
        return self._shaped(self._kept[0], num_rows)

    def _shaped(self, memory: NDArray[np.float32], num_rows: int) -> NDArray[np.float32]:
        return memory[: num_rows * self.num_columns].reshape(num_rows, self.num_columns)
