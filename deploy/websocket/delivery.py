"""How the messages of one request reach its client: in order, each once, over one session after another.

Numbers them, keeps what may be asked for again, and goes on in a new session where the old one was cut. Refuses to know
what they say.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import orjson

from ..errors import ApiError
from .window import Window

if TYPE_CHECKING:
    from .peer import Peer


class Recipient(Protocol):
    """The session in which messages reach a client."""

    peer: Peer
    num_kept: int  # bytes of messages in the windows of its requests

    @property
    def has_room(self) -> bool:
        """Whether its requests may leave more messages unacknowledged."""


R = TypeVar("R", bound=Recipient)


class Delivery(Generic[R]):
    """The way to the client of request `id`. `bell` is set whenever there may be room again.

    With `keep`, messages are kept until the client has acknowledged them, and while too many are not, there is no room.
    """

    def __init__(self, id: str, session: R, keep: bool) -> None:
        self.session: R | None = session
        self.bell = asyncio.Event()
        self._name = b'"id":' + orjson.dumps(id)
        self._window = Window(keep)
        self._is_caught_up = True  # the session has had all that went before

    @property
    def is_open(self) -> bool:
        """Whether somebody is there."""
        return self.session is not None and self._is_caught_up

    @property
    def has_room(self) -> bool:
        """Whether one more message may be made. One of those whose window is empty may always be."""
        if self.session is None or not self._is_caught_up or self._window.is_full:
            return False
        return self.session.has_room or not self._window.num_bytes

    @property
    def is_acknowledged(self) -> bool:
        """Whether the client has all there is."""
        return self._window.acknowledged == self._window.last

    def num_after(self, last: int) -> int:
        """Messages behind `last` that are made."""
        return self._window.last - last

    def message(self, kind: bytes, members: bytes) -> bytes:
        """A message without a number: `members` is the inside of a JSON object."""
        return b'{"type":"%b",%b,%b}' % (kind, self._name, members)

    async def tell(self, kind: bytes, members: bytes) -> None:
        """Sends a message without a number, if somebody is there. It is not kept."""
        if self.session is not None:
            await self._send(self.session, self.message(kind, members))

    async def put(self, kind: bytes, members: bytes) -> None:
        """Sends the next message, or leaves it in the window for a session to come."""
        message = self.message(kind, b'"seq":%d,%b' % (self._window.last + 1, members))
        num_bytes = self._window.num_bytes
        self._window.add(message)
        if self.session is None:
            return
        self.session.num_kept += self._window.num_bytes - num_bytes
        if self._is_caught_up:
            await self._send(self.session, message)

    def acknowledge(self, last: int) -> None:
        """Message `last` has arrived. `ApiError` if it was never sent."""
        self._check_sent(last)
        num_bytes = self._window.num_bytes
        self._window.acknowledge(last)
        if self.session is not None:
            self.session.num_kept += self._window.num_bytes - num_bytes
        self.bell.set()

    def check_resumption(self, last: int) -> None:
        """`ApiError` if it can not go on behind message `last`."""
        if last < self._window.acknowledged:
            message = f"last = {last}: up to {self._window.acknowledged} was said to have arrived, and is not kept"
            raise ApiError("invalid_value", message, param="last")
        self._check_sent(last)

    async def resume(self, session: R, last: int) -> None:
        """Goes on in another session, behind message `last`."""
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
            self.bell.set()

    def leave(self) -> None:
        """Its session is not its any more."""
        if self.session is not None:
            self.session.num_kept -= self._window.num_bytes
            self.session = None

    def _check_sent(self, last: int) -> None:
        if last > self._window.last:
            raise ApiError("invalid_value", f"last = {last}: the last sent is {self._window.last}", param="last")

    async def _send(self, session: R, message: bytes) -> None:
        """A client that is gone is for its session to notice."""
        with suppress(ConnectionError):
            await session.peer.send(message)
