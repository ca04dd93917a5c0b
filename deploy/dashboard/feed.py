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

from ...runtime.log import get_logger
from ..errors import ApiError, not_serving, unforeseen
from ..keys import Keys
from ..metrics import Metrics
from ..middleware import REQUEST_ID
from ..service import Service
from ..sockets.peer import GOING_AWAY, INTERNAL_ERROR, TRY_AGAIN_LATER, Peer
from . import snapshots
from .derived import NowAndThen
from .live import LiveViewer
from .trace_log import TraceLog
from .viewer import INTERVAL_S

if TYPE_CHECKING:
    from ...stages.engine import Engine
    from ...stages.outbox import RequestOutbox

MAX_VIEWERS = 64
MAX_RECENT = 60

log = get_logger("millrace.deploy")


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
        self._viewers: set[LiveViewer] = set()
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
        peer = Peer(request, self.service.config)
        await peer.open()
        viewer = LiveViewer(self, peer)
        try:
            if len(self._viewers) >= MAX_VIEWERS:
                message = f"{MAX_VIEWERS} dashboards are open: close one"
                await peer.end(TRY_AGAIN_LATER, ApiError("too_many_connections", message, retry_after_s=1.0))
                return peer.response
            self._viewers.add(viewer)
            await viewer.run()
        except ConnectionError:
            pass  # the viewer is gone
        except Exception as error:
            log.error("dashboard.failed", error=type(error).__name__, exc_info=error)
            await peer.end(INTERNAL_ERROR, unforeseen(request[REQUEST_ID]))
        finally:
            self._viewers.discard(viewer)
            await peer.release()
        return peer.response

    async def close(self) -> None:
        """Says goodbye to everybody."""
        error = not_serving(self.service.health)
        await asyncio.gather(*(viewer.peer.end(GOING_AWAY, error) for viewer in self._viewers))

    def trace_log(self, engine: Engine) -> TraceLog:
        """What the trace says; read at most once an interval, however many look."""
        now_s = asyncio.get_running_loop().time()
        if self._log is None:
            self._log = TraceLog(engine.pipeline.tracer)
        if now_s - self._read_s > INTERVAL_S / 2:
            self._read_s = now_s
            self._log.refresh()
        return self._log
