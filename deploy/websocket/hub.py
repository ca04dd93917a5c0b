"""The WebSockets of one server, from the handshake to the close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from aiohttp import web

from ...runtime.env.log import get_logger
from ..api.openai.generation import Generation
from ..api.responses.service import ResponseService
from ..errors import ApiError, not_serving, unforeseen
from ..http.connections import error_response
from ..http.request_context import OWNER, REQUEST_ID
from ..metrics.metrics import Metrics
from .base_session import SocketSession
from .context import SocketContext
from .peer import GOING_AWAY, INTERNAL_ERROR, TRY_AGAIN_LATER, Peer
from .responses_session import ResponsesSession
from .session import Session
from .stream import RequestStream
from .stream_registry import StreamRegistry

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine

log = get_logger("millrace.deploy")


class Hub:
    """All sessions of one server, on its event loop. Call `watch` once the engine exists."""

    def __init__(self, generation: Generation, responses: ResponseService, metrics: Metrics, threads: Executor) -> None:
        self._context = SocketContext(generation, metrics, threads)
        self._streams: StreamRegistry[RequestStream] = StreamRegistry(self._context)
        self._service = generation.service
        self._config = generation.service.config
        self._responses = responses
        self._sessions: set[SocketSession] = set()

    def watch(self, engine: Engine) -> None:
        """Notifies streams when their requests end, even if their outboxes are not being read."""
        self._streams.watch(engine)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/stream`. While the server drains, only for clients that may come back to a request."""
        if not self._streams.has_orphans:
            self._service.refuse_if_draining()
        return await self._serve(request, lambda peer: Session(self._streams, peer, request[OWNER]))

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/responses`."""
        owner, request_id = request[OWNER], request[REQUEST_ID]
        return await self._serve(
            request, lambda peer: ResponsesSession(self._context, peer, owner, request_id, self._responses)
        )

    async def _serve(self, request: web.Request, make_session: Callable[[Peer], SocketSession]) -> web.StreamResponse:
        self._service.require_engine()
        peer = Peer(request, self._config)
        try:
            await peer.open()
        except ConnectionError:  # the client has left and will not read this
            return error_response(ApiError("bad_request", "the client left before its handshake was answered"))
        session = make_session(peer)
        try:
            if len(self._sessions) >= self._config.ws_max_sockets:
                message = f"{self._config.ws_max_sockets} sockets are open; try again shortly"
                await peer.end(TRY_AGAIN_LATER, ApiError("too_many_connections", message, retry_after_s=1.0))
                return peer.response
            self._sessions.add(session)
            await session.run()
        except ConnectionError:
            pass  # the client has left; the session has ended its requests
        except Exception as error:
            log.error("socket.failed", error=type(error).__name__, exc_info=error)
            await peer.end(INTERNAL_ERROR, unforeseen(request[REQUEST_ID]))
        finally:
            self._sessions.discard(session)
            await peer.release()
        return peer.response

    # -- shutdown

    def drain(self) -> None:
        """Closes sockets without running requests. Requests that wait for a reconnect go on."""
        for session in list(self._sessions):
            session.end_if_drained()

    async def wait_until_resumed(self, limit_s: float) -> None:
        """Waits until clients have come back to their requests, or no longer may; at most `limit_s` seconds."""
        await self._streams.wait_until_resumed(limit_s)

    async def close(self) -> None:
        """Closes all sockets with an error message, then cancels all tasks."""
        error = not_serving(self._service.health)
        await asyncio.gather(*(session.peer.end(GOING_AWAY, error) for session in self._sessions))
        self._context.cancel()
