"""The data shared by the viewers of one running server: keys, the trace's log, and the last ended requests."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import Executor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...runtime.pipeline import NotServing
from ..api.service import Service
from ..http.api_keys import ApiKeys
from ..metrics.metrics import Metrics
from . import snapshots
from .block_map import BlockMap
from .derived import ThrottledValue
from .fleet import WarmPrefixes
from .flow import FlowRates, TokenCounts
from .history import Counts, HistoryLog
from .prefixes import Prefixes
from .trace_log import TraceLog
from .viewer import INTERVAL_S

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine
    from ...stages.engine.engine_status import EngineStatus
    from ...stages.exit.outboxes import RequestOutbox

MAX_RECENT = 60
MAX_REQUESTS = 600  # in a frame of the history: the oldest ones


class LiveSources:
    """The shared data of one server. Used on its loop; call `watch` once the engine is ready."""

    def __init__(self, service: Service, metrics: Metrics, threads: Executor, version: str) -> None:
        self.service = service
        self.metrics = metrics
        self.threads = threads
        self.bottleneck: ThrottledValue[dict[str, Any]] = ThrottledValue(threads)
        self.version = version
        self.keys = ApiKeys(service.config.api_key)
        self.admin_keys = ApiKeys(service.config.admin_key, "admin key")
        self._log: TraceLog | None = None
        self._read_s = float("-inf")  # time of the last refresh of the log
        self.flow = FlowRates()
        self.history = HistoryLog(threads)
        self.prefixes = Prefixes()
        self.warm = WarmPrefixes()
        self.recent: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MAX_RECENT)  # (owner, ended request)

    def watch(self, engine: Engine) -> None:
        """Starts to collect the last ended requests and the history."""
        assert engine.pipeline.exit is not None
        engine.pipeline.exit.on_end.append(self._request_ended)
        if engine.pipeline.watch is not None:
            engine.pipeline.watch.on_tick.append(lambda late_s: self._note(engine))

    def _note(self, engine: Engine) -> None:
        with suppress(NotServing):  # its process is being started again
            self.history.note(engine.pipeline.env.now(), lambda: self._counts(engine))

    def _counts(self, engine: Engine) -> Counts:
        num_prompt, num_generated = self.metrics.num_tokens(engine)
        if (core := engine.status().core) is None:
            return Counts(len(engine.exit.live), 0, 0.0, num_generated, num_prompt, 0)
        scheduler, held = core.scheduler, core.cache.used_share
        waiting, preemptions = scheduler.num_waiting, scheduler.num_preemptions
        return Counts(scheduler.num_running, waiting, held, num_generated, num_prompt, preemptions)

    def _request_ended(self, outbox: RequestOutbox, cause: str, error: BaseException | None) -> None:
        if outbox.request.parent_id is None:
            live = self.service.live.get(outbox.request_id)
            self.recent.append(("" if live is None else live.owner, snapshots.ended_request(outbox, cause)))

    def trace_log(self, engine: Engine) -> TraceLog:
        """The log of the trace; refreshed at most once per interval for any number of viewers."""
        now_s = asyncio.get_running_loop().time()
        if self._log is None:
            self._log = TraceLog(engine.pipeline.tracer)
        if now_s - self._read_s > INTERVAL_S / 2:
            self._read_s = now_s
            self._log.refresh()
        return self._log

    def overview(self, engine: Engine, status: EngineStatus) -> dict[str, Any]:
        """Topic `overview`."""
        return snapshots.overview(engine, status, self.service.health) | {
            "bottleneck": self.bottleneck.value,
            "num_engines": len(engine.engines),
        }

    def pipeline(self, engine: Engine, status: EngineStatus) -> dict[str, Any]:
        """Topic `pipeline`, with the rates of the channels."""
        stats = {name: channel.stats for name, channel in status.pipeline.channels.items()}
        num_prompt, num_generated = self.metrics.num_tokens(engine)
        num_computed = self.trace_log(engine).num_tokens if engine.has_core else 0
        self.flow.note(engine.pipeline.env.now(), stats, TokenCounts(num_prompt, num_generated, num_computed))
        return snapshots.pipeline(status.pipeline, self.metrics.stage_load, self.flow)

    async def keep_history(self, engine: Engine) -> None:
        """Adds a frame to the history, if it is due. Called while a page is open."""
        now_s, log = engine.pipeline.env.now(), self.trace_log(engine)
        if not self.history.claim(now_s):
            return
        try:
            await engine.refresh(with_blocks=True)
            began_s = time.perf_counter()
            state = self._moment(engine)
            cost_s = time.perf_counter() - began_s
        except BaseException:
            self.history.release()
            raise
        await self.history.take(now_s, state, cost_s, log.steps_since, log.incidents_since)

    def _moment(self, engine: Engine) -> dict[str, Any]:
        """The data of all views now. Its cost depends on the number of requests and blocks."""
        assert engine.pipeline.exit is not None
        service, live = self.service, list(engine.pipeline.exit.live.values())
        status = engine.status(with_sequences=True, with_blocks=True)
        found: dict[str, Any] = {
            "overview": self.overview(engine, status),
            "pipeline": self.pipeline(engine, status),
            "loop": snapshots.loop_health(engine, service.watchdog, with_stacks=False),
            "requests": [snapshots.request_row(engine, status, outbox) for outbox in live[:MAX_REQUESTS]],
            "recent": list(self.recent),
            "owners": self._owners() if self.keys else {},
        }
        if (times := self.metrics.latencies) is not None:
            found["latency"] = snapshots.latency(times)
        if (block_owners := snapshots.block_owners(engine, status)) is not None:
            found["blocks"] = BlockMap().next(block_owners)
            found["prefixes"] = self.prefixes.value
        return found

    def _owners(self) -> dict[str, str]:
        """The key of each live request, and of the last ended ones."""
        return {name: one.owner for known in (self.service.ended, self.service.live) for name, one in known.items()}
