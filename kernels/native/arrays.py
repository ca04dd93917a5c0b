"""Arrays for the library: aligned, addressed, and buffers of logits that are used again."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from .page_preallocation import LARGE_PAGE
from .shape import Array, Floats

CACHE_LINE = 64  # bytes
NUM_KEPT = 2  # logits buffers; a caller may hold the logits of one step while the next one runs
UNHELD = 2  # reference count of an unused buffer: the list, and the argument of getrefcount


def aligned_zeros(shape: tuple[int, ...], item: np.dtype[Any]) -> Array:
    """A zeroed array, aligned to a large page of the system or, if it is smaller, to a cache line.

    An array of numpy's own begins 16 bytes into a page, so that many vectors straddle two cache lines: attention of
    prompts took 1 to 4 % longer (256 and 512 tokens, AVX2 on a Zen 3 class EPYC).
    """
    num_bytes = math.prod(shape) * item.itemsize
    alignment = LARGE_PAGE if num_bytes >= LARGE_PAGE else CACHE_LINE
    memory = np.zeros(num_bytes + alignment, np.uint8)
    begin = -memory.ctypes.data % alignment
    return memory[begin : begin + num_bytes].view(item).reshape(shape)


def address(array: Array, dtype: type[np.generic]) -> int:
    """Address of an array, which must be contiguous and of type `dtype`."""
    assert array.dtype == dtype and array.flags.c_contiguous, f"{array.dtype} {array.strides}: not contiguous {dtype}"
    return int(array.ctypes.data)


def addresses(arrays: Array, dtype: type[np.generic]) -> tuple[int, ...]:
    """Addresses of `arrays[i]`, of an array that must be as for `address`."""
    first = address(arrays, dtype)
    return tuple(first + i * arrays.strides[0] for i in range(len(arrays)))


class LogitsBuffers:
    """Allocates uninitialized float32 arrays [rows, columns], from buffers that are no longer referenced if possible.

    New memory would come from the system each time; for 512 rows of 49,152 that is 1/25 of the step.
    """

    def __init__(self, num_columns: int) -> None:
        self.num_columns = num_columns
        self._kept: list[Floats] = []

    def take(self, num_rows: int) -> Floats:
        size = num_rows * self.num_columns
        for place in range(len(self._kept)):
            if sys.getrefcount(self._kept[place]) == UNHELD:
                if self._kept[place].size >= size:
                    return self._shaped(self._kept[place], num_rows)
                del self._kept[place]  # too small for this request
                break
        self._kept = [np.empty(size, np.float32), *self._kept[: NUM_KEPT - 1]]
        return self._shaped(self._kept[0], num_rows)

    def _shaped(self, memory: Floats, num_rows: int) -> Floats:
        return memory[: num_rows * self.num_columns].reshape(num_rows, self.num_columns)
