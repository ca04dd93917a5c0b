"""The set of viewers of one dashboard: limits their number, serves them, and closes them with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from ...runtime.env.log import get_logger
from ..config import ServerConfig
from ..errors import ApiError, unforeseen
from ..http.request_context import REQUEST_ID
from ..websocket.peer import INTERNAL_ERROR, TRY_AGAIN_LATER, Peer
from .viewer import Viewer

log = get_logger("millrace.deploy")


class Viewers:
    """At most `most` viewers at a time. `are_there` completes the refusal, as in "64 dashboards are open"."""

    def __init__(self, most: int, are_there: str) -> None:
        self._most = most
        self._are_there = are_there
        self._viewers: set[Viewer] = set()

    async def show(
        self, request: web.Request, config: ServerConfig, make_viewer: Callable[[Peer], Viewer]
    ) -> web.StreamResponse:
        """Serves one viewer on its WebSocket, from the handshake to the end."""
        peer = Peer(request, config)
        await peer.open()
        viewer = make_viewer(peer)
        try:
            if len(self._viewers) >= self._most:
                message = f"{self._most} {self._are_there}: close one"
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

    async def close(self, code: int, error: ApiError) -> None:
        """Closes the sockets of all viewers with this code and error."""
        await asyncio.gather(*(viewer.peer.end(code, error) for viewer in self._viewers))
