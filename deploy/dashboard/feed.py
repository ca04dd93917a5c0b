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

from concurrent.futures import Executor
from typing import TYPE_CHECKING

from aiohttp import web

from ..api.service import Service
from ..errors import not_serving
from ..metrics.metrics import Metrics
from ..websocket.peer import GOING_AWAY
from .live import LiveViewer
from .live_sources import LiveSources
from .viewers import Viewers

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine

MAX_VIEWERS = 64


class Feed:
    """The viewers of one server, on its loop."""

    def __init__(self, service: Service, metrics: Metrics, threads: Executor, version: str) -> None:
        self.service = service
        self._sources = LiveSources(service, metrics, threads, version)
        self._viewers = Viewers(MAX_VIEWERS, "dashboards are open")

    def watch(self, engine: Engine) -> None:
        """From now on the last requests that ended can be found."""
        self._sources.watch(engine)

    async def socket(self, request: web.Request) -> web.StreamResponse:
        """`GET /dashboard/feed`. It answers whatever state the engine is in."""
        return await self._viewers.show(request, self.service.config, lambda peer: LiveViewer(self._sources, peer))

    async def close(self) -> None:
        """Says goodbye to everybody."""
        await self._viewers.close(GOING_AWAY, not_serving(self.service.health))
