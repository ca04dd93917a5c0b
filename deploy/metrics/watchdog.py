"""The watchdog of one engine: reports stalls, crashes and a blocked event loop.

It runs at the ticks of the pipeline's watch and reports to the health state, log, trace and flight recorder.
`runtime/health/stalls.py` defines a stall.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING

from ...runtime.env.log import get_logger
from ...runtime.health.flight_recorder import FlightRecorder, stack_of
from ...runtime.health.stalls import Stall, find_stall
from ...runtime.pipeline import NotServing
from ...runtime.trace.tracer import EventKind
from ...runtime.watch import Watch
from ..config import ServerConfig
from .loop_meter import LoopGuard, LoopMeter
from .stats_line import NumTokens, StatsLine

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine

log = get_logger("millrace.deploy")


class Watchdog:
    """Call `watch` once the engine exists, on its loop, and `stop` before it stops.

    `stall` is the current stall.
    """

    def __init__(self, config: ServerConfig, threads: Executor | None) -> None:
        self.stall: Stall | None = None
        self.num_stalls = 0
        self.meter = LoopMeter()
        self.recorder = _recorder(config)
        self._timeout_s = config.stall_timeout_s
        self._stats_interval_s = config.stats_interval_s
        self._threads = threads
        self._engine: Engine | None = None
        self._stats: StatsLine | None = None
        self._guard: LoopGuard | None = None
        self._watch: Watch | None = None
        self._next_check_s = 0.0

    def watch(self, engine: Engine, num_tokens: NumTokens) -> None:
        """Starts to watch the engine, which must have started.

        `num_tokens` counts tokens for `engine.stats`.
        """
        self._engine = engine
        self._stats = StatsLine(engine, num_tokens, self._stats_interval_s)
        engine.pipeline.on_crash.append(self._crashed)
        self._guard = LoopGuard(self.meter, self._timeout_s, self._loop_stalled)
        self._guard.start()
        self._watch = engine.pipeline.watch
        assert self._watch is not None, "watch() before the engine has started"
        self._watch.idle_tick_s = min(self._watch.idle_tick_s, self._timeout_s / 4)
        self.meter.beat(0.0, self._watch.tick_s)
        self._watch.on_tick.append(self._tick)
        self._watch.on_pause.append(self.meter.pause_us.observe)

    def stop(self) -> None:
        """Stops watching. Idempotent."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.on_tick.remove(self._tick)
            watch.on_pause.remove(self.meter.pause_us.observe)
        if self._guard is not None:
            self._guard.stop()

    def record(self, reason: str, **details: object) -> asyncio.Future[Path] | None:
        """Writes a flight recording in a thread; the future is its path.

        None without a recorder, or if it has just written one.
        """
        pipeline = None if self._engine is None else self._engine.pipeline
        write = None if self.recorder is None else self.recorder.begin(reason, pipeline, **details)
        if write is None:
            return None
        try:
            return asyncio.get_running_loop().run_in_executor(self._threads, _logged, write)
        except RuntimeError as error:  # no thread, or the server has stopped: what is recorded here goes on
            log.error("flight.failed", error=type(error).__name__, reason=str(error))
            return None

    # -- checks

    def _tick(self, late_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        assert self._watch is not None
        self.meter.beat(late_s, self._watch.tick_s)
        if self._engine is not None and self._engine.health.is_ready and self._stats is not None:
            self._stats.check()
            if now_s >= self._next_check_s:
                self._next_check_s = now_s + min(0.9, self._timeout_s / 8)  # idle ticks are 1 s apart
                self.check()

    def check(self) -> None:
        """Updates `stall`; reports a new stall and the end of one."""
        assert self._engine is not None
        before, self.stall = self.stall, find_stall(self._engine.pipeline, self._timeout_s)
        if self.stall is not None and (before is None or before.name != self.stall.name):
            self._stalled(self.stall)
        elif self.stall is None and before is not None:
            log.info("pipeline.moves_again", stage=before.name)

    def _stalled(self, stall: Stall) -> None:
        assert self._engine is not None
        self.num_stalls += 1
        waited_s = round(stall.waited_s, 3)
        log.error("pipeline.stalled", stage=stall.name, waited_s=waited_s, num_waiting=stall.num_waiting)
        tracer = self._engine.pipeline.tracer
        tracer.emit(EventKind.STALL, tracer.source(stall.name), 0, int(stall.waited_s * 1e6), stall.num_waiting)
        self.record("stall", name=stall.name, waited_s=waited_s, num_waiting=stall.num_waiting)

    def _crashed(self, stage: str, error: BaseException, request_ids: Sequence[str]) -> None:
        details = {"error": type(error).__name__, "stack": stack_of(error), "request_ids": list(request_ids)}
        self.record("crash", stage=stage, **details)

    def _loop_stalled(self, waited_s: float) -> None:
        """Writes a flight recording. Runs in the guard's thread, as the loop is blocked."""
        if self.recorder is None or self._engine is None:
            return
        try:
            pipeline = self._engine.pipeline
        except NotServing:  # the engine has stopped while the loop is still busy: nothing to record
            return
        write = self.recorder.begin("loop", pipeline, waited_s=round(waited_s, 3))
        if write is not None:
            _logged(write)


def _recorder(config: ServerConfig) -> FlightRecorder | None:
    folder = config.flight_recorder_dir
    return None if folder is None else FlightRecorder(Path(folder), config.flight_recorder_s)


def _logged(write: Callable[[], Path]) -> Path:
    try:
        path = write()
    except OSError as error:
        log.error("flight.failed", error=type(error).__name__, reason=error.strerror)
        raise
    log.info("flight.written", path=str(path), num_bytes=path.stat().st_size)
    return path
