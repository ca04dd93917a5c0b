"""A packed matrix of a file as a source of rows: what products on codes are packed from, without numbers in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..kernels.layout.grouped_codes import GroupedCodes, GroupedFormat

Index = slice | NDArray[np.int64]

UNPACKED_AT_ONCE = 2 << 20  # codes, where they are unpacked in portions: numbers in float32, with others on the way


@dataclass(frozen=True, slots=True, eq=False)
class GroupedMatrix:
    """A `GroupedSource`: row i is the stored row `order[i]`; None: all, as they are stored."""

    format: GroupedFormat
    num_stored: int  # rows
    num_columns: int
    take: Callable[[Index], GroupedCodes]  # stored rows: those of [start, stop), or by number
    order: NDArray[np.int64] | None = None
    columns: NDArray[np.int32] | None = None  # as in `GroupedCodes`
    factor: float = 1.0  # of the codes of all rows
    drop: Callable[[int, int], None] | None = None  # releases the memory of stored rows [first, last); None: cannot

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_stored if self.order is None else len(self.order), self.num_columns

    @property
    def is_mapped(self) -> bool:
        """Whether rows are views of a mapped file: taken one by one they cost no more than all at once."""
        return self.drop is not None

    def rows(self, first: int, last: int) -> GroupedCodes:
        """Rows [first, last)."""
        if self.order is None:
            return self.take(slice(first, last))
        index = self.order[first:last]
        begin = int(index[0]) if len(index) else 0
        is_run = np.array_equal(index, np.arange(begin, begin + len(index)))
        return self.take(slice(begin, begin + len(index)) if is_run else index)

    def portions(self, num_codes: int) -> Iterator[tuple[int, GroupedCodes]]:
        """All rows in portions of about so many codes, each with its first row. Forgets those that were taken."""
        num_rows, width = self.shape
        step = max(1, num_codes // width)
        for first in range(0, num_rows, step):
            last = min(first + step, num_rows)
            yield first, self.rows(first, last)
            self.forget(first, last)

    def unpacked(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """The numbers of all rows, `UNPACKED_AT_ONCE` at a time, each portion with its first row."""
        for first, codes in self.portions(UNPACKED_AT_ONCE):
            with np.errstate(invalid="ignore", over="ignore"):  # of a factor that is no number, which others refuse
                numbers = codes.dequantize()
            yield first, numbers

    def forget(self, first: int, last: int) -> None:
        """Releases the memory of rows [first, last), where these are stored one behind another."""
        if self.drop is not None and self.order is None:
            self.drop(first, last)

    def picked(self, rows: Index) -> GroupedMatrix:
        """The matrix of some rows of this one, in their order."""
        order = np.arange(self.num_stored) if self.order is None else self.order
        return replace(self, order=order[rows])
