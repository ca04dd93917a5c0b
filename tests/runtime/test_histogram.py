"""Exact histograms: every number in its bucket, and the sum of all."""

from __future__ import annotations

import random
from bisect import bisect_left

import numpy as np
import pytest

from millrace.runtime.histogram import Histogram


def test_a_number_on_a_bound_belongs_below_it():
    histogram = Histogram((10, 20))
    for value in (0, 10, 11, 20, 21, 10_000):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 2]
    assert histogram.cumulative() == [2, 4, 6]
    assert (histogram.total, histogram.num_observed) == (10_062, 6)


@pytest.mark.parametrize("num_values", [0, 1, 2, 1000])
def test_many_at_once_are_the_same_as_one_by_one(num_values: int):
    draw = random.Random(num_values)
    bounds = (3, 9, 27, 81)
    for spread in (0, 100):
        values = [draw.randint(9, 9 + spread) for _ in range(num_values)]
        histogram = Histogram(bounds)
        histogram.observe_many(np.array(values, np.int64))
        counts = [0] * 5
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        assert (histogram.counts, histogram.total) == (counts, sum(values))


@pytest.mark.parametrize("bounds", [(), (1, 1), (2, 1)])
def test_bounds_that_do_not_rise_are_refused(bounds: tuple[int, ...]):
    with pytest.raises(ValueError, match="must be rising"):
        Histogram(bounds)
