"""Quantiles of latencies over time."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.deploy.metrics.latency_log import INTERVAL_S, MAX_ROWS, LatencyLog
from millrace.runtime.histogram import LatencyHistogram


def test_a_row_has_the_quantiles_of_its_own_interval():
    now, gaps, rest = [10.0], LatencyHistogram([1]), LatencyHistogram([1])
    gaps.observe(5_000, 1_000)  # before
    kept = LatencyLog({"gaps": gaps, "rest": rest}, lambda: now[0])
    gaps.observe_many(np.arange(1, 101) * 100)
    now[0] += INTERVAL_S / 2
    kept.tick()
    assert not kept.rows
    now[0] += INTERVAL_S / 2
    kept.tick()
    (ended_s, measured), *_ = kept.rows
    assert ended_s == 12.0 and measured == {"gaps": pytest.approx((100, 5_000, 9_900), rel=0.0101)}
    now[0] += INTERVAL_S
    kept.tick()
    assert kept.num_rows == 1  # nothing was measured


def test_of_a_long_life_the_last_rows_are_kept():
    now, gaps = [0.0], LatencyHistogram([1])
    kept = LatencyLog({"gaps": gaps}, lambda: now[0])
    for value in range(1, MAX_ROWS + 6):
        now[0] += INTERVAL_S
        gaps.observe(value)
        kept.tick()
    rows, count = kept.rows_since(0)
    assert count == MAX_ROWS + 5 and len(rows) == MAX_ROWS and rows[-1][0] == now[0]
    assert kept.rows_since(count - 2)[0] == rows[-2:] and kept.rows_since(count) == ([], count)
