"""`GET /dashboard/feed`: a WebSocket on which a viewer subscribes to topics and gets updates.

    viewer                                          server
    {"type": "hello", "key", "admin_key"}      ->
                                               <-   {"type": "hello", "version", "interval_s", "can_cancel", ...}
    {"type": "subscribe", "topics": {...}}     ->
                                               <-   {"type": "update", "now_s", "full": {topic: data}, "patch": {...}}
    {"type": "cancel", "id"}                   ->   (needs the admin key)

A topic comes in full first, then as changes: `patch` is a JSON merge patch, except for `steps`, `incidents`,
`quantiles` and `blocks`, which have their own formats. The next update is made after the last one is sent, so a slow
viewer misses some and delays no other; a viewer without subscriptions costs nothing. `now_s` is the engine's clock.
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
    """The viewers of one server. Used on the server's loop."""

    def __init__(self, service: Service, metrics: Metrics, threads: Executor, version: str) -> None:
        self.service = service
        self._sources = LiveSources(service, metrics, threads, version)
        self._viewers = Viewers(MAX_VIEWERS, "dashboards are open")

    def watch(self, engine: Engine) -> None:
        """Starts to collect the last ended requests."""
        self._sources.watch(engine)

    async def socket(self, request: web.Request) -> web.StreamResponse:
        """`GET /dashboard/feed`. It works in every state of the engine."""
        return await self._viewers.show(request, self.service.config, lambda peer: LiveViewer(self._sources, peer))

    async def close(self) -> None:
        """Closes the sockets of all viewers with the server's health as reason."""
        await self._viewers.close(GOING_AWAY, not_serving(self.service.health))
