"""Delivery of the messages of one request: in order, each once, across reconnects.

`ChunkDelivery` numbers the messages, keeps them until they are acknowledged, and continues in a new session after a
disconnect.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import orjson

from ..errors import ApiError
from .window import MessageWindow

if TYPE_CHECKING:
    from .peer import Peer


class Recipient(Protocol):
    """The session that sends messages to a client."""

    peer: Peer
    num_kept: int  # bytes of messages in the windows of its requests

    @property
    def has_room(self) -> bool:
        """Whether its requests may leave more messages unacknowledged."""


R = TypeVar("R", bound=Recipient)


class ChunkDelivery(Generic[R]):
    """Sends the messages of request `id` to its client.

    `wakeup` is set whenever `has_room` may have become true, and when the client leaves. With `keep`, messages are kept
    until the client acknowledges them; while too many are kept, there is no room.
    """

    def __init__(self, id: str, session: R, keep: bool) -> None:
        self.session: R | None = session
        self.wakeup = asyncio.Event()
        self._name = b'"id":' + orjson.dumps(id)
        self._window = MessageWindow(keep)
        self._is_caught_up = True  # every message so far was sent in this session

    @property
    def is_open(self) -> bool:
        """Whether a client is connected and all earlier messages were sent to it."""
        return self.session is not None and self._is_caught_up

    @property
    def has_room(self) -> bool:
        """Whether one more message may be made.

        If the session's budget is used up, a request with an empty window may still make one.
        """
        if self.session is None or not self._is_caught_up or self._window.is_full:
            return False
        return self.session.has_room or not self._window.num_bytes

    @property
    def is_acknowledged(self) -> bool:
        """Whether the client has acknowledged every message."""
        return self._window.acknowledged == self._window.last

    def num_after(self, last: int) -> int:
        """The number of messages made after message `last`."""
        return self._window.last - last

    def message(self, kind: bytes, members: bytes) -> bytes:
        """A message without a number. `members` is a JSON object without its braces."""
        return b'{"type":"%b",%b,%b}' % (kind, self._name, members)

    async def send_unnumbered(self, kind: bytes, members: bytes) -> None:
        """Sends a message without a number, if a client is connected. It is not kept."""
        if self.session is not None:
            await self._send(self.session, self.message(kind, members))

    async def put(self, kind: bytes, members: bytes) -> None:
        """Sends the next message, or leaves it in the window until the client resumes."""
        message = self.message(kind, b'"seq":%d,%b' % (self._window.last + 1, members))
        num_bytes = self._window.num_bytes
        self._window.add(message)
        if self.session is None:
            return
        self.session.num_kept += self._window.num_bytes - num_bytes
        if self._is_caught_up:
            await self._send(self.session, message)

    def acknowledge(self, last: int) -> None:
        """Drops messages up to number `last`, which the client has received.

        `ApiError` if `last` was never sent.
        """
        self._check_sent(last)
        num_bytes = self._window.num_bytes
        self._window.acknowledge(last)
        if self.session is not None:
            self.session.num_kept += self._window.num_bytes - num_bytes
        self.wakeup.set()

    def check_resumption(self, last: int) -> None:
        """`ApiError` if the request cannot continue after message `last`."""
        if last < self._window.acknowledged:
            message = f"last = {last}: messages up to {self._window.acknowledged} were acknowledged and are not kept"
            raise ApiError("invalid_value", message, param="last")
        self._check_sent(last)

    async def resume(self, session: R, last: int) -> None:
        """Continues in another session, after message `last`: sends the kept messages first."""
        self.leave()
        self._window.acknowledge(last)
        self.session, self._is_caught_up = session, False
        session.num_kept += self._window.num_bytes
        await self._send(session, self.message(b"resumed", b'"last":%d' % last))
        while self.session is session and (message := self._window.after(last)) is not None:
            last += 1
            await self._send(session, message)
        if self.session is session:
            self._is_caught_up = True
            self.wakeup.set()

    def leave(self) -> None:
        """Detaches from the session."""
        if self.session is not None:
            self.session.num_kept -= self._window.num_bytes
            self.session = None
            self.wakeup.set()

    def _check_sent(self, last: int) -> None:
        if last > self._window.last:
            raise ApiError("invalid_value", f"last = {last}: must be at most {self._window.last}", param="last")

    async def _send(self, session: R, message: bytes) -> None:
        """Sends `message`; a disconnect is handled by the session."""
        with suppress(ConnectionError):
            await session.peer.send(message)
