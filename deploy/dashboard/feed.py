"""`GET /dashboard/feed`: a WebSocket on which a viewer subscribes to topics and gets updates.

    viewer                                          server
    {"type": "hello", "key", "admin_key"}      ->
                                               <-   {"type": "hello", "version", "interval_s", "can_cancel", ...}
    {"type": "subscribe", "topics": {...}}     ->
                                               <-   {"type": "update", "now_s", "full": {topic: data}, "patch": {...}}
    {"type": "cancel", "id"}                   ->   (needs the admin key)

A topic comes in full first, then as changes: `patch` is a JSON merge patch, except for `steps`, `incidents` and
`blocks`, which have their own formats. The next update is made after the last one is sent, so a slow viewer misses some
and delays no other; a viewer without subscriptions costs nothing. `now_s` is the engine's clock.
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
    """The viewers of one server, and the data that they share. Used on the server's loop."""

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

    async def socket(self, request: web.Request) -> web.StreamResponse:
        """`GET /dashboard/feed`. It works in every state of the engine."""
        return await self._viewers.show(request, self.service.config, lambda peer: LiveViewer(self, peer))

    async def close(self) -> None:
        """Closes the sockets of all viewers with the server's health as reason."""
        await self._viewers.close(GOING_AWAY, not_serving(self.service.health))

    def trace_log(self, engine: Engine) -> TraceLog:
        """The log of the trace; refreshed at most once per interval for any number of viewers."""
        now_s = asyncio.get_running_loop().time()
        if self._log is None:
            self._log = TraceLog(engine.pipeline.tracer)
        if now_s - self._read_s > INTERVAL_S / 2:
            self._read_s = now_s
            self._log.refresh()
        return self._log
