"""Exact histograms: counts by bucket and a sum, of whole numbers.

Knows counting. Refuses to know what is counted and who asks. Times go in as whole microseconds, as the trace has them:
so a recount from the trace gives the very same figures, and no sum drifts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

# of what a stage does with one batch: most take tens of microseconds, a step on a CPU may take a second
STAGE_BOUNDS_US = (
    *(10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000),
    *(1_000_000, 2_500_000, 5_000_000, 10_000_000),
)


class Histogram:
    """Numbers by bucket: bucket i has those above `bounds[i - 1]` and at most `bounds[i]`, the last those above all.

    `observe` costs under 1 us, on 2 busy cores. One writer; a reader on the same loop sees counts and sum that belong
    together.
    """

    __slots__ = ("_bounds", "bounds", "counts", "total")

    def __init__(self, bounds: Sequence[int]) -> None:
        if not bounds or any(low >= high for low, high in pairwise(bounds)):
            raise ValueError(f"histogram bounds {list(bounds)}: must be rising, and at least one")
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0  # sum of all numbers
        self._bounds = np.array(bounds, np.int64)

    def observe(self, value: int, times: int = 1) -> None:
        """Counts `value`, so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def observe_many(self, values: NDArray[np.integer[Any]]) -> None:
        """Counts each of `values` [N]. The many that are all alike are looked up once."""
        if not len(values):
            return
        low = int(values.min())
        if low == int(values.max()):
            return self.observe(low, len(values))
        places = np.searchsorted(self._bounds, values)
        for place, count in enumerate(np.bincount(places, minlength=len(self.counts)).tolist()):
            self.counts[place] += count
        self.total += int(values.sum())

    @property
    def num_observed(self) -> int:
        """How many numbers were counted."""
        return sum(self.counts)

    def cumulative(self) -> list[int]:
        """For each bound how many numbers are at most that, and last how many there are."""
        return list(accumulate(self.counts))
