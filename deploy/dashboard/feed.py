"""`GET /dashboard/feed`: one WebSocket, on which a viewer says what it wants to see and gets it a few times a second.

    viewer                                          server
    {"type": "hello", "key", "admin_key"}      ->
                                               <-   {"type": "hello", "version", "interval_s", "can_cancel", ...}
    {"type": "subscribe", "topics": {...}}     ->
                                               <-   {"type": "update", "now_s", "full": {topic: data}, "patch": {...}}
    {"type": "cancel", "id"}                   ->   (takes the admin key)

A topic comes in full first, then as changes: `patch` is a JSON merge patch, but that `steps`, `incidents` and `blocks`
say in their own way what is new. An update is made when the last one has left, so a slow viewer misses some and holds
up nobody; one that subscribes to nothing costs nothing. `now_s` is the engine's clock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ..api.service import Service
from ..errors import not_serving
from ..http.api_keys import Keys
from ..metrics.metrics import Metrics
from ..websocket.peer import GOING_AWAY
from . import snapshots
from .derived import NowAndThen
from .live import LiveViewer
from .trace_log import TraceLog
from .viewer import INTERVAL_S
from .viewers import Viewers

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine
    from ...stages.exit.outboxes import RequestOutbox

MAX_VIEWERS = 64
MAX_RECENT = 60


class Feed:
    """The viewers of one server, on its loop."""

    def __init__(self, service: Service, metrics: Metrics, threads: Executor, version: str) -> None:
        self.service = service
        self.metrics = metrics
        self.threads = threads
        self.bottleneck: NowAndThen[dict[str, Any]] = NowAndThen(threads)
        self.version = version
        self.keys = Keys(service.config.api_key)
        self.admin_keys = Keys(service.config.admin_key, "admin key")
        self._viewers = Viewers(MAX_VIEWERS, "dashboards are open")
        self._log: TraceLog | None = None
        self._read_s = float("-inf")  # when the log was refreshed
        self.recent: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MAX_RECENT)  # (owner, request) that have ended

    def watch(self, engine: Engine) -> None:
        """From now on the last requests that ended can be found."""
        assert engine.pipeline.exit is not None
        engine.pipeline.exit.on_end.append(self._request_ended)

    def _request_ended(self, outbox: RequestOutbox, cause: str, error: BaseException | None) -> None:
        if outbox.request.parent_id is None:
            live = self.service.live.get(outbox.request_id)
            self.recent.append(("" if live is None else live.owner, snapshots.ended_request(outbox, cause)))

    async def socket(self, request: web.Request) -> web.StreamResponse:
        """`GET /dashboard/feed`. It answers whatever state the engine is in."""
        return await self._viewers.show(request, self.service.config, lambda peer: LiveViewer(self, peer))

    async def close(self) -> None:
        """Says goodbye to everybody."""
        await self._viewers.close(GOING_AWAY, not_serving(self.service.health))

    def trace_log(self, engine: Engine) -> TraceLog:
        """What the trace says; read at most once an interval, however many look."""
        now_s = asyncio.get_running_loop().time()
        if self._log is None:
            self._log = TraceLog(engine.pipeline.tracer)
        if now_s - self._read_s > INTERVAL_S / 2:
            self._read_s = now_s
            self._log.refresh()
        return self._log
