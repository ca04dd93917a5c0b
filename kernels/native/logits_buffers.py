"""Reusable buffers for the logits of steps."""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

NUM_KEPT = 2  # a caller may hold the logits of one step while the next one runs
UNHELD = 2  # reference count of an unused buffer: the list, and the argument of getrefcount


class ReusedRows:
    """Allocates uninitialized float32 arrays [rows, columns], from buffers that are no longer referenced if possible.

    New memory would come from the system each time; for 512 rows of 49,152 that is 1/25 of the step.
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
                del self._kept[place]  # too small for this request
                break
        self._kept = [np.empty(size, np.float32), *self._kept[: NUM_KEPT - 1]]
        return self._shaped(self._kept[0], num_rows)

    def _shaped(self, memory: NDArray[np.float32], num_rows: int) -> NDArray[np.float32]:
        return memory[: num_rows * self.num_columns].reshape(num_rows, self.num_columns)
