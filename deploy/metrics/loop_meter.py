"""How late the event loop is, and how long collections of garbage hold everything up: histograms, and a guard.

What blocks the loop blocks whoever would say so, so the guard is a thread of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import Metric

from ...runtime.env.log import get_logger
from ...runtime.histogram import Histogram
from .families import US, histogram

LAG_US = (100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 5_000_000)
PAUSE_US = (10, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000)

log = get_logger("millrace.deploy")


class LoopMeter:
    """Lateness of the pipeline's clock, and collections of any thread, as its watch tells of them."""

    def __init__(self) -> None:
        self.lag_us = Histogram(LAG_US)
        self.pause_us = Histogram(PAUSE_US)
        self.due_s = time.monotonic()  # when it is to beat next

    def beat(self, late_s: float, next_s: float) -> None:
        """A timer went off so much later than it was to, and is to go off again in `next_s`."""
        self.due_s = time.monotonic() + next_s
        self.lag_us.observe(max(0, int(late_s * 1e6)))

    def collect(self) -> Iterator[Metric]:
        """As Prometheus has them."""
        text = "How late timers of the event loop go off."
        yield histogram("millrace:event_loop_lag_seconds", text, self.lag_us, {}, US)
        text = "How long collections of garbage hold everything up."
        yield histogram("millrace:gc_pause_seconds", text, self.pause_us, {}, US)


class LoopGuard:
    """A thread that calls `on_stall(seconds)` once each time that the loop's beat is late by `timeout_s`."""

    def __init__(self, meter: LoopMeter, timeout_s: float, on_stall: Callable[[float], object]) -> None:
        self._meter = meter
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="millrace-guard", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def stop(self) -> None:
        """Looks no more. Idempotent."""
        self._is_over.set()

    def _run(self) -> None:
        told_due_s = None
        while not self._is_over.wait(self._timeout_s / 4):
            due_s = self._meter.due_s
            waited_s = time.monotonic() - due_s
            if waited_s >= self._timeout_s and due_s != told_due_s:
                told_due_s = due_s
                log.error("loop.stalled", waited_s=round(waited_s, 3))
                self._on_stall(waited_s)
