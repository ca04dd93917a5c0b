"""`WriteWatch`: finds a write that waits too long for its client to read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...runtime.env.awake_time import LATE_S, MAX_LATE_STEPS, NUM_STEPS


class WriteWatch:
    """Calls `on_stall` once a write has waited for `limit_s`, from `start` to `stop`.

    It looks eight times in `limit_s`: cheaper than a timeout for each write. Time in which this process stood still
    does not count, as it could not write either; of one write, that of `MAX_LATE_STEPS` looks.
    """

    def __init__(self, limit_s: float, on_stall: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._look_s = limit_s / NUM_STEPS
        self._limit_s, self._on_stall = limit_s, on_stall
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._num_late = 0  # looks at the write that waits
        self._moved_s: float | None = None  # what `waits_since_s` is after the last of them
        self.waits_since_s: float | None = None  # by the loop's clock; None: no write waits. Set by the writer

    def start(self) -> None:
        """Begins to look."""
        self._due_s = self._loop.time() + self._look_s
        self._timer = self._loop.call_at(self._due_s, self._look)

    def stop(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        now_s = self._loop.time()
        late_s, since_s = now_s - self._due_s, self.waits_since_s
        if since_s is not None:
            if since_s != self._moved_s:
                self._num_late = 0  # another write
            if late_s >= LATE_S and self._num_late < MAX_LATE_STEPS:
                self._num_late += 1
                self.waits_since_s = self._moved_s = min(now_s, since_s + late_s)
            elif now_s - since_s >= self._limit_s:
                self._on_stall()
                return
        self.start()
