"""The data shared by the viewers of one running server: keys, the trace's log, and the last ended requests."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from ..api.service import Service
from ..http.api_keys import ApiKeys
from ..metrics.metrics import Metrics
from . import snapshots
from .derived import ThrottledValue
from .trace_log import TraceLog
from .viewer import INTERVAL_S

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine
    from ...stages.exit.outboxes import RequestOutbox

MAX_RECENT = 60


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
        self.recent: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MAX_RECENT)  # (owner, ended request)

    def watch(self, engine: Engine) -> None:
        """Starts to collect the last ended requests."""
        assert engine.pipeline.exit is not None
        engine.pipeline.exit.on_end.append(self._request_ended)

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
