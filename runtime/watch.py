"""The watch: a periodic timer that traces edge depths, times of stages, loop lag and garbage collections.

Ten times a second while requests are live, once a second otherwise. Other periodic checks subscribe to `on_tick`.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable, Mapping
from contextvars import Context
from typing import Any, Protocol

from .channel import Channel, ChannelStats
from .trace.tracer import EventKind, Tracer

TICK_S = 0.1
IDLE_TICK_S = 1.0  # while no request lives: waking a core costs up to 1 ms, however little it does
MIN_LAG_US = 1_000  # less is the resolution of timers
MIN_STANDSTILL_S = 1.0  # a tick this late means that the loop, or the whole process, stood still
MIN_PAUSE_US = 200  # of a recorded collection; those of the youngest generation come hundreds of times a second


class SpentTimes(Protocol):
    """A stage's time so far, by state."""

    idle: float
    busy: float
    blocked: float


class WatchedStage(Protocol):
    """What the watch reads of a stage's runner."""

    @property
    def times(self) -> SpentTimes: ...


class Watch:
    """Inspects the channels and stages of one pipeline every TICK_S on the running loop.

    While `is_busy()` is false and nothing calls `wake`, every `idle_tick_s`. In virtual time a periodic timer would
    keep the simulation going: there a test calls the `write` methods instead of `start`.
    """

    def __init__(
        self,
        tracer: Tracer,
        channels: Mapping[str, Channel[Any]],
        now: Callable[[], float],
        is_busy: Callable[[], bool] = lambda: True,
        stages: Mapping[str, WatchedStage] | None = None,
    ) -> None:
        self._tracer = tracer
        self._now = now
        self._edges = [(tracer.source(name), channel) for name, channel in channels.items()]
        self._last: dict[int, ChannelStats] = {}  # by source
        self._stages = [(tracer.source(name), stage) for name, stage in (stages or {}).items()]
        self._last_us: dict[int, tuple[int, int, int]] = {}  # by source: busy, blocked, idle
        self._loop_source, self._gc_source = tracer.source("loop"), tracer.source("gc")
        self.on_tick: list[Callable[[float], object]] = []  # called at each tick with its lateness in seconds
        self.on_pause: list[Callable[[int], object]] = []  # called after each collection, in its thread: microseconds
        self.resumed_s = -math.inf  # when the loop last continued after a standstill
        self._is_busy = is_busy
        self.idle_tick_s = IDLE_TICK_S  # lowered by a subscriber that needs shorter ticks
        self.tick_s = TICK_S  # from the last tick to the next
        # NOTE: of its own, as `wake` is called for a request, whose id would mark the log lines of all later ticks
        self._context = Context()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._gc_began_s = 0.0
        self._pauses: list[tuple[int, int, int]] = []  # of threads without a ring, kept until the next tick

    def start(self) -> None:
        """Begins to tick, until `stop`."""
        gc.callbacks.append(self._on_gc)
        self._wait()

    def wake(self) -> None:
        """Reports new work: the next tick comes within TICK_S.

        An overdue tick is kept, so that it reports its lag.
        """
        if self._timer is not None and self.tick_s > TICK_S and self._due_s - self._now() > TICK_S:
            self._timer.cancel()
            self.tick_s = TICK_S
            self._wait()

    def stop(self) -> None:
        """Ends the ticks. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            gc.callbacks.remove(self._on_gc)

    def write_edge_depths(self) -> None:
        """Writes EDGE_DEPTH for each edge that is full or changed since the last call."""
        if not self._tracer.enabled:
            return
        for source, channel in self._edges:
            stats, last = channel.stats(), self._last.get(source)
            if last is None:
                last = ChannelStats(channel.capacity, 0, 0, 0, 0, 0.0, 0.0)
            is_full = stats.depth >= stats.capacity
            if stats.num_sent != last.num_sent or stats.depth != last.depth or is_full:
                self._last[source] = stats
                full_us = int((stats.seconds_full - last.seconds_full) * 1e6)
                counts = (stats.depth, channel.take_high_water(), stats.num_sent - last.num_sent, full_us)
                self._tracer.emit(EventKind.EDGE_DEPTH, source, 0, *counts)

    def write_stage_times(self) -> None:
        """Writes STAGE_TIME for each stage that was not idle since the last call."""
        if not self._tracer.enabled:
            return
        for source, stage in self._stages:
            times = stage.times
            now_us = (int(1e6 * times.busy), int(1e6 * times.blocked), int(1e6 * times.idle))
            last_us = self._last_us.get(source, (0, 0, 0))
            self._last_us[source] = now_us
            busy_us, blocked_us, idle_us = (now - last for now, last in zip(now_us, last_us, strict=True))
            if busy_us or blocked_us:
                self._tracer.emit(EventKind.STAGE_TIME, source, 0, busy_us, blocked_us, idle_us)

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._due_s = self._now() + self.tick_s
        self._timer = loop.call_later(self.tick_s, self._tick, context=self._context)

    def _tick(self) -> None:
        lag_s = self._now() - self._due_s
        self.tick_s = TICK_S if self._is_busy() else max(self.idle_tick_s, TICK_S)
        self._wait()
        if lag_s >= MIN_STANDSTILL_S:
            self.resumed_s = self._now()
        if lag_s * 1e6 >= MIN_LAG_US:
            self._tracer.emit(EventKind.LOOP_LAG, self._loop_source, 0, int(lag_s * 1e6))
        pauses, self._pauses = self._pauses, []
        for pause in pauses:
            self._tracer.emit(EventKind.GC_PAUSE, self._gc_source, 0, *pause)
        self.write_edge_depths()
        self.write_stage_times()
        for callback in self.on_tick:
            callback(lag_s)

    def _on_gc(self, phase: str, info: Mapping[str, int]) -> None:
        """Called by the collector in any thread, at any point, also while a ring is being made.

        So it writes only if this thread has a ring; otherwise the next tick does.
        """
        if phase == "start":
            self._gc_began_s = self._now()
            return
        pause_us = int((self._now() - self._gc_began_s) * 1e6)
        for callback in self.on_pause:
            callback(pause_us)
        if pause_us < MIN_PAUSE_US:
            return
        pause = (pause_us, info["generation"], info["collected"])
        if self._tracer.has_ring:
            self._tracer.emit(EventKind.GC_PAUSE, self._gc_source, 0, *pause)
        else:
            self._pauses.append(pause)
