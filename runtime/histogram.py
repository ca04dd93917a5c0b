"""Exact histograms of whole numbers: counts by bucket, and the sum; and sketches of latencies, for quantiles.

Times are whole microseconds, as in the trace. So a recount from the trace gives the same figures, and no sum drifts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import ceil, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

# of the time a stage takes for a batch: mostly tens of microseconds; a step on a CPU may take a second
STAGE_BOUNDS_US = (
    *(10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000),
    *(1_000_000, 2_500_000, 5_000_000, 10_000_000),
)

GROWTH = 1.02  # from one bucket of a sketch to the next: a quantile is at most 1 % off
ZERO = -1  # a sketch's bucket of zeros

_PER_LOG = 1.0 / log(GROWTH)


class Histogram:
    """Counts by bucket, and a sum.

    Bucket i counts values in (`bounds[i - 1]`, `bounds[i]`], the last one those above all bounds.

    One writer. A reader on the same loop sees a consistent pair of counts and sum.
    """

    __slots__ = ("_bounds", "bounds", "counts", "total")

    def __init__(self, bounds: Sequence[int]) -> None:
        if not bounds or any(low >= high for low, high in pairwise(bounds)):
            raise ValueError(f"histogram bounds {list(bounds)}: must be rising, and at least one")
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0  # sum of all values
        self._bounds = np.array(bounds, np.int64)

    def observe(self, value: int, times: int = 1) -> None:
        """Counts `value` `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def observe_many(self, values: NDArray[np.integer[Any]]) -> None:
        """Counts each of `values` [N]. Equal values are looked up once."""
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
        """How many values were counted."""
        return sum(self.counts)

    def cumulative(self) -> list[int]:
        """For each bound the number of values at most that; last the number of all values."""
        return list(accumulate(self.counts))


class LatencyHistogram(Histogram):
    """A histogram of microseconds with a sketch of the distribution, for quantiles (DDSketch, arXiv 1908.10693).

    Bucket i of the sketch counts values in (GROWTH ** (i - 1), GROWTH ** i].
    """

    __slots__ = ("sketch",)

    def __init__(self, bounds: Sequence[int]) -> None:
        super().__init__(bounds)
        self.sketch: dict[int, int] = {}

    def observe(self, value: int, times: int = 1) -> None:
        super().observe(value, times)
        if times:
            place = ceil(log(value) * _PER_LOG) if value > 0 else ZERO
            self.sketch[place] = self.sketch.get(place, 0) + times

    def observe_many(self, values: NDArray[np.integer[Any]]) -> None:
        super().observe_many(values)
        if not len(values) or int(values.min()) == int(values.max()):
            return  # `observe` has counted them
        indices = np.zeros(len(values), np.intp)  # of buckets, from that of zeros on
        is_some = values > 0
        indices[is_some] = np.ceil(np.log(values[is_some]) * _PER_LOG) - ZERO
        counts = np.bincount(indices)
        for index in counts.nonzero()[0].tolist():
            place = index + ZERO
            self.sketch[place] = self.sketch.get(place, 0) + int(counts[index])


def quantile(sketch: Mapping[int, int], share: float) -> float | None:
    """The value that `share` of a sketch's values do not exceed; None if it has none."""
    left = ceil(share * sum(sketch.values()))
    for place in sorted(sketch):
        left -= sketch[place]
        if left <= 0 and sketch[place]:
            return 0.0 if place == ZERO else 2 * GROWTH**place / (GROWTH + 1)  # the middle of the bucket
    return None
