"""A resumed request that runs in another front of this server: its messages travel through a socket to that one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from ..api.fronts import Fronts, FrontSocket
from ..errors import ApiError, describe, unforeseen
from .context import SocketContext
from .peer import Peer

LAST_KINDS = ("done", "error")  # types of a request's last message


class RelayedStream:
    """One request, resumed with the message `resume`, until `leave` or the end of the other front's socket.

    `on_end` is called then. The request survives the loss of this socket, as it would there.
    """

    def __init__(
        self,
        context: SocketContext,
        peer: Peer,
        fronts: Fronts,
        front: int,
        resume: Mapping[str, Any],
        on_end: Callable[[], None],
    ) -> None:
        self._peer, self._on_end = peer, on_end
        self._unsent: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self._unsent.put_nowait(resume)
        self._task = context.spawn(self._run(fronts, front))
        self.is_done = False  # its last message was sent: the id may be used again
        self.error: ApiError | None = None  # why it ended, if the client was not told

    def forward(self, raw: Mapping[str, Any]) -> None:
        """Carries a message of the client about this request."""
        self._unsent.put_nowait(raw)

    def leave(self) -> None:
        """The client's socket has ended, or the id is used for another request."""
        self._task.cancel()

    async def _run(self, fronts: Fronts, front: int) -> None:
        try:
            async with fronts.open_socket(self._peer.headers, front, "/v1/stream") as socket:
                sending = asyncio.ensure_future(self._send(socket))
                try:
                    while (message := await socket.receive()) is not None:
                        self.is_done = self.is_done or orjson.loads(message).get("type") in LAST_KINDS
                        await self._peer.send(message)
                finally:
                    socket.is_over = self._peer.has_left
                    sending.cancel()
        except ConnectionError:
            pass  # one of the two has left
        except Exception as error:
            self.error = describe(error) or unforeseen("of the socket")
        finally:
            self._on_end()

    async def _send(self, socket: FrontSocket) -> None:
        while True:
            await socket.send(orjson.dumps(await self._unsent.get()))
