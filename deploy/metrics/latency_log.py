"""p50 and p99 of latencies over time, for the dashboard.

Each row covers one interval. It is made from what the sketches have counted since the row before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ...runtime.histogram import LatencyHistogram, quantile

INTERVAL_S = 2.0
MAX_ROWS = 400  # kept: the last 13 minutes
QUANTILES = (0.5, 0.99)

Row = tuple[float, dict[str, tuple[float, ...]]]  # end of the interval; by name: count, then the quantiles in us


class LatencyLog:
    """The rows of some histograms, which are numbered from 0. Call `tick` at least once in each interval."""

    def __init__(self, histograms: Mapping[str, LatencyHistogram], now: Callable[[], float]) -> None:
        self.rows: deque[Row] = deque(maxlen=MAX_ROWS)
        self.num_rows = 0  # so far
        self._histograms = histograms
        self._now = now
        self._before = {name: one.sketch.copy() for name, one in histograms.items()}
        self._due_s = now() + INTERVAL_S

    def tick(self, late_s: float = 0.0) -> None:
        """Adds a row if the interval is over and something was measured in it."""
        now_s = self._now()
        if now_s < self._due_s:
            return
        self._due_s = now_s + INTERVAL_S
        measured = {}
        for name, histogram in self._histograms.items():
            sketch, before = histogram.sketch.copy(), self._before[name]
            self._before[name] = sketch
            if figures := _figures({place: count - before.get(place, 0) for place, count in sketch.items()}):
                measured[name] = figures
        if measured:
            self.rows.append((round(now_s, 3), measured))
            self.num_rows += 1

    def rows_since(self, number: int) -> tuple[list[Any], int]:
        """(kept rows after the first `number` ones, number of all rows so far)."""
        kept = min(self.num_rows - number, len(self.rows))
        return list(self.rows)[len(self.rows) - kept :], self.num_rows


def _figures(sketch: Mapping[int, int]) -> tuple[float, ...]:
    """(count, quantiles in us); empty if nothing was measured."""
    count = sum(sketch.values())
    if not count:
        return ()
    return (count, *(round(quantile(sketch, share) or 0.0, 1) for share in QUANTILES))
