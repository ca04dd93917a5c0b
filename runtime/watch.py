"""Writes, a few times a second while requests live, what no stage writes: how full the edges are, how late the loop is,
and how long the collector of garbage held everything up. The one clock of a running pipeline: who looks after it
listens here. While nothing lives it goes once a second, and sees less of what holds the loop for less than that.

Knows channels and the loop. Refuses to judge: who reads the trace says what is too late or too full.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable, Mapping
from typing import Any

from .channel import Channel, ChannelStats
from .trace.tracer import EventKind, Tracer

TICK_S = 0.1
IDLE_TICK_S = 1.0  # while no request lives: what wakes a core costs it up to 1 ms, however little it does
MIN_LAG_US = 1_000  # less is the resolution of timers
MIN_STANDSTILL_S = 1.0  # a tick so late says that the loop, or the whole process, was held
MIN_PAUSE_US = 200  # of a collection worth a record; the youngest generation's come hundreds of times a second


class Watch:
    """Looks at the channels of one pipeline. `start` has it look every TICK_S on the running loop, and every
    `idle_tick_s` while `is_busy()` is false and until it is told to `wake`. In virtual time a clock of its own would
    keep the world going: there a test calls `look`."""

    def __init__(
        self,
        tracer: Tracer,
        channels: Mapping[str, Channel[Any]],
        now: Callable[[], float],
        is_busy: Callable[[], bool] = lambda: True,
    ) -> None:
        self._tracer = tracer
        self._now = now
        self._edges = [(tracer.source(name), channel) for name, channel in channels.items()]
        self._last: dict[int, ChannelStats] = {}  # by source
        self._loop_source, self._gc_source = tracer.source("loop"), tracer.source("gc")
        self.on_tick: list[Callable[[float], object]] = []  # told at each tick by how many seconds it was late
        self.on_pause: list[Callable[[int], object]] = []  # told of each collection, in its thread: microseconds
        self.resumed_s = -math.inf  # when the loop last went on after a standstill: nothing could move before
        self._is_busy = is_busy
        self.idle_tick_s = IDLE_TICK_S  # to be lowered by who has to hear sooner
        self.tick_s = TICK_S  # from the last tick to the next
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._gc_began_s = 0.0
        self._pauses: list[tuple[int, int, int]] = []  # in threads without a ring, until the next tick

    def start(self) -> None:
        """From now on, until `stop`."""
        gc.callbacks.append(self._on_gc)
        self._wait()

    def wake(self) -> None:
        """Something begins: looks in TICK_S, if it would have later. A look that is overdue says by how much."""
        if self._timer is not None and self.tick_s > TICK_S and self._due_s - self._now() > TICK_S:
            self._timer.cancel()
            self.tick_s = TICK_S
            self._wait()

    def stop(self) -> None:
        """Looks no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            gc.callbacks.remove(self._on_gc)

    def look(self) -> None:
        """Writes EDGE_DEPTH for each edge that carried something since the last look, or changed its depth."""
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

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._due_s = self._now() + self.tick_s
        self._timer = loop.call_later(self.tick_s, self._tick)

    def _tick(self) -> None:
        late_s = self._now() - self._due_s
        self.tick_s = TICK_S if self._is_busy() else max(self.idle_tick_s, TICK_S)
        self._wait()
        if late_s >= MIN_STANDSTILL_S:
            self.resumed_s = self._now()
        if late_s * 1e6 >= MIN_LAG_US:
            self._tracer.emit(EventKind.LOOP_LAG, self._loop_source, 0, int(late_s * 1e6))
        pauses, self._pauses = self._pauses, []
        for pause in pauses:
            self._tracer.emit(EventKind.GC_PAUSE, self._gc_source, 0, *pause)
        self.look()
        for tell in self.on_tick:
            tell(late_s)

    def _on_gc(self, phase: str, info: Mapping[str, int]) -> None:
        """Called by the collector, in whichever thread it struck and whatever that was doing, the making of a ring
        included. So it writes where a ring is, and leaves it to the next tick where none is."""
        if phase == "start":
            self._gc_began_s = self._now()
            return
        pause_us = int((self._now() - self._gc_began_s) * 1e6)
        for tell in self.on_pause:
            tell(pause_us)
        if pause_us < MIN_PAUSE_US:
            return
        pause = (pause_us, info["generation"], info["collected"])
        if self._tracer.has_ring:
            self._tracer.emit(EventKind.GC_PAUSE, self._gc_source, 0, *pause)
        else:
            self._pauses.append(pause)
