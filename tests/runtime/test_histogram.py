"""Exact histograms: every number in its bucket, and the sum of all."""

from __future__ import annotations

import random
from bisect import bisect_left
from math import ceil

import numpy as np
import pytest

from millrace.runtime.histogram import Histogram, LatencyHistogram, quantile


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


@pytest.mark.parametrize("values", [[0], [1], [7] * 5, [0, 0, 0, 9], [1, 2, 3, 10_000, 7_200_000_000]])
def test_quantiles_of_a_sketch_are_within_one_percent(values: list[int]):
    one_by_one, at_once = LatencyHistogram([10]), LatencyHistogram([10])
    for value in values:
        one_by_one.observe(value)
    at_once.observe_many(np.array(values, np.int64))
    assert at_once.sketch == one_by_one.sketch and at_once.counts == one_by_one.counts
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        right = sorted(values)[ceil(share * len(values)) - 1]
        assert quantile(at_once.sketch, share) == pytest.approx(right, rel=0.0101)


def test_quantiles_of_many_latencies_are_those_of_numpy_within_one_percent():
    draw = np.random.default_rng(5)
    values = np.round(draw.lognormal(8.0, 1.5, 20_000)).astype(np.int64)
    histogram = LatencyHistogram([1_000])
    for part in np.array_split(values, 7):
        histogram.observe_many(part)
    for share in (0.1, 0.5, 0.99, 0.999):
        right = np.quantile(values, share, method="inverted_cdf")
        assert quantile(histogram.sketch, share) == pytest.approx(float(right), rel=0.0101)
    assert quantile({}, 0.5) is None and quantile({4: 0}, 0.5) is None
