"""Base class of WebSocket sessions: receives messages one at a time until the socket closes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

from ..errors import ApiError, not_serving
from .context import SocketContext
from .envelopes import error_message, is_utf8, parse
from .peer import GOING_AWAY, INVALID_PAYLOAD, Peer


class SocketSession:
    """The running requests of one socket.

    `run` returns, or is cancelled, when the socket has closed.
    """

    ABOUT_NOTHING: ClassVar[Mapping[str, Any]] = {}  # of an error whose message names no request

    def __init__(self, context: SocketContext, peer: Peer, owner: str) -> None:
        self.peer = peer
        self.owner = owner
        self._context = context

    @property
    def is_idle(self) -> bool:
        """Whether no request is running on this socket."""
        raise NotImplementedError

    async def take(self, raw: dict[str, Any], num_bytes: int) -> None:
        """Handles one message of the client, of `num_bytes` bytes.

        Answers a wrong message with an error message.
        """
        raise NotImplementedError

    def leave(self) -> None:
        """Ends the running requests, as the socket has closed."""
        raise NotImplementedError

    async def run(self) -> None:
        """Serves the client until it disconnects.

        Text that is not a JSON object is answered with an error message that names no request; bytes that are not UTF-8
        close the socket.
        """
        try:
            while (data := await self.peer.receive()) is not None:
                try:
                    raw = await self._context.compute(len(data), parse, data, self._context.config.max_body_bytes)
                except ApiError as error:
                    if is_utf8(data):
                        await self._send_error(error, self.ABOUT_NOTHING)
                    else:
                        await self.peer.end(INVALID_PAYLOAD, error)
                    continue
                await self.take(raw, len(data))
        finally:
            self.leave()

    def end_if_drained(self) -> None:
        """Closes the socket if the server is draining and no request is running on it."""
        if self._context.service.is_draining and self.is_idle:
            self._context.spawn(self.peer.end(GOING_AWAY, not_serving(self._context.service.health)))

    async def _send_error(self, error: ApiError, about: Mapping[str, Any]) -> None:
        """Counts an error and sends it as a message.

        The fields of `about` name the message that caused it.
        """
        self._context.metrics.count_rejection(error.code)
        with suppress(ConnectionError):  # the client has left
            await self.peer.send(error_message(error, about))
