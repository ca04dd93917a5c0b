"""How busy each stage was in the last seconds, from the counters that `/metrics` exports."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...stages.insight.bottleneck import WINDOW_S

if TYPE_CHECKING:
    from ...runtime.pipeline_status import PipelineStatus

MIN_S = 0.25  # between two readings of ticks

Reading = dict[str, tuple[float, float]]  # by stage: seconds busy and blocked so far


class StageLoad:
    """Readings of the last `WINDOW_S` seconds. Call `note` a few times a second, also without a viewer."""

    def __init__(self, read: Callable[[], PipelineStatus], now: Callable[[], float]) -> None:
        """`read` makes the status of the stages."""
        self._read = read
        self._now = now
        self._readings: deque[tuple[float, Reading]] = deque()
        self.note()

    def note(self, late_s: float = 0.0) -> None:
        """Reads the counters of all stages, at most every `MIN_S` seconds."""
        if not self._readings or self._now() - self._readings[-1][0] >= MIN_S:
            self._add()

    def _add(self) -> None:
        now_s = self._now()
        reading = {name: (stage.busy, stage.blocked) for name, stage in self._read().stages.items()}
        if self._readings and any(busy < self._readings[-1][1][name][0] for name, (busy, _) in reading.items()):
            self._readings.clear()  # the engine process was replaced
        self._readings.append((now_s, reading))
        while len(self._readings) > 2 and self._readings[1][0] <= now_s - WINDOW_S:
            self._readings.popleft()

    def shares(self) -> Reading:
        """(busy, blocked) by stage: shares of the time since the first reading kept, up to now."""
        self._add()
        (then_s, before), (now_s, after) = self._readings[0], self._readings[-1]
        passed_s = now_s - then_s
        if passed_s <= 0:
            return dict.fromkeys(after, (0.0, 0.0))
        return {
            name: ((busy - before[name][0]) / passed_s, (blocked - before[name][1]) / passed_s)
            for name, (busy, blocked) in after.items()
        }
