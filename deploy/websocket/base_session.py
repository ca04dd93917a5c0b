"""What the sessions of all sockets have in common: messages in, one by one, until the client is gone.

Knows a socket's life. Refuses to know what its messages mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..errors import ApiError, not_serving
from .context import SocketContext
from .envelopes import error_message, parse
from .peer import GOING_AWAY, INVALID_PAYLOAD, Peer


class SocketSession:
    """What one socket has under way. `run` returns, or is cancelled, when the socket is gone."""

    def __init__(self, context: SocketContext, peer: Peer, owner: str) -> None:
        self.peer = peer
        self.owner = owner
        self._context = context

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way here."""
        raise NotImplementedError

    async def take(self, raw: dict[str, Any], num_bytes: int) -> None:
        """One message of the client, which had so many bytes; what is wrong with it is told."""
        raise NotImplementedError

    def leave(self) -> None:
        """The socket is gone: ends what is under way."""
        raise NotImplementedError

    async def run(self) -> None:
        """Serves the client until it is gone. Text that is no JSON object ends the socket, as nobody can say which
        request it was for."""
        try:
            while (data := await self.peer.receive()) is not None:
                try:
                    raw = await self._context.compute(len(data), parse, data, self._context.config.max_body_bytes)
                except ApiError as error:
                    await self.peer.end(INVALID_PAYLOAD, error)
                    continue
                await self.take(raw, len(data))
        finally:
            self.leave()

    def end_if_drained(self) -> None:
        """Says goodbye if the server is to stop and nothing is under way here."""
        if self._context.service.is_draining and self.is_idle:
            self._context.spawn(self.peer.end(GOING_AWAY, not_serving(self._context.service.health)))

    async def _tell(self, error: ApiError, about: Mapping[str, Any]) -> None:
        """Says what is wrong, and with which message."""
        self._context.metrics.count_rejection(error.code)
        with suppress(ConnectionError):  # nobody is there to be told
            await self.peer.send(error_message(error, about))
