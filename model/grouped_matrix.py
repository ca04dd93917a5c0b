"""A packed matrix of a file as a source of rows: what products on codes are packed from, without numbers in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..kernels.layout.grouped_codes import GroupedCodes, GroupedFormat

Index = slice | NDArray[np.int64]


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

    def rows(self, first: int, last: int) -> GroupedCodes:
        """Rows [first, last)."""
        if self.order is None:
            return self.take(slice(first, last))
        index = self.order[first:last]
        begin = int(index[0]) if len(index) else 0
        is_run = np.array_equal(index, np.arange(begin, begin + len(index)))
        return self.take(slice(begin, begin + len(index)) if is_run else index)

    def forget(self, first: int, last: int) -> None:
        """Releases the memory of rows [first, last), where these are stored one behind another."""
        if self.drop is not None and self.order is None:
            self.drop(first, last)

    def picked(self, rows: Index) -> GroupedMatrix:
        """The matrix of some rows of this one, in their order."""
        order = np.arange(self.num_stored) if self.order is None else self.order
        return replace(self, order=order[rows])
