"""Histograms of event loop lag and GC pauses, and a guard against a blocked loop.

A blocked loop cannot report itself, so the guard runs in a thread of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import Metric

from ...runtime.env.log import get_logger
from ...runtime.histogram import LatencyHistogram
from ...runtime.workers.thread_start import start_thread
from .families import US, histogram

LAG_US = (100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 5_000_000)
PAUSE_US = (10, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000)

log = get_logger("millrace.deploy")


class LoopMeter:
    """Event loop lag and GC pauses in microseconds, as reported by the pipeline's watch."""

    def __init__(self) -> None:
        self.lag_us = LatencyHistogram(LAG_US)
        self.pause_us = LatencyHistogram(PAUSE_US)
        self.due_s = time.monotonic()  # monotonic time of the next expected beat

    def beat(self, late_s: float, next_s: float) -> None:
        """Records a timer that fired `late_s` too late; the next one is due in `next_s`."""
        self.due_s = time.monotonic() + next_s
        self.lag_us.observe(max(0, int(late_s * 1e6)))

    def collect(self) -> Iterator[Metric]:
        """Yields both histograms as Prometheus metrics, in seconds."""
        text = "Delay of the event loop's timers."
        yield histogram("millrace:event_loop_lag_seconds", text, self.lag_us, {}, US)
        text = "Pauses for garbage collection."
        yield histogram("millrace:gc_pause_seconds", text, self.pause_us, {}, US)


class LoopGuard:
    """A thread that calls `on_stall(seconds)` once for each beat that is `timeout_s` late.

    `on_stall` runs in this thread.
    """

    def __init__(self, meter: LoopMeter, timeout_s: float, on_stall: Callable[[float], object]) -> None:
        self._meter = meter
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="millrace-guard", daemon=True)

    def start(self) -> None:
        """Starts the thread. Raises `ThreadNotStarted` if the system refuses."""
        start_thread(self._thread)

    def stop(self) -> None:
        """Ends the thread without waiting for it. Idempotent."""
        self._is_over.set()

    def _run(self) -> None:
        reported_due_s = None
        while not self._is_over.wait(self._timeout_s / 4):
            due_s = self._meter.due_s
            waited_s = time.monotonic() - due_s
            if waited_s >= self._timeout_s and due_s != reported_due_s:
                reported_due_s = due_s
                log.error("loop.stalled", waited_s=round(waited_s, 3))
                self._on_stall(waited_s)
