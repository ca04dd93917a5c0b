"""The streams of one server: those running in the engine, and those waiting for a reconnect."""

from __future__ import annotations

import asyncio
import hmac
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from ..errors import ApiError
from .context import SocketContext

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine
    from ...stages.exit.outboxes import RequestOutbox

MAX_ORPHANS = 1024  # requests without a socket


class Registered(Protocol):
    """The part of a stream that the registry uses."""

    id: str
    owner: str
    token: str | None

    def wake(self) -> None:
        """Called when the request has ended in the engine."""

    def stop(self, cause: str) -> None:
        """Ends the stream at once, without further messages."""


S = TypeVar("S", bound=Registered)


class StreamRegistry(Generic[S]):
    """The registry of one server, on its event loop. Call `watch` once the engine exists."""

    def __init__(self, context: SocketContext) -> None:
        self.context = context
        self._by_token: dict[str, S] = {}
        self._orphans: set[S] = set()  # without a socket
        self._fewer_orphans = asyncio.Event()
        self._by_answer: dict[str, S] = {}  # streams whose requests are running in the engine

    def watch(self, engine: Engine) -> None:
        """Notifies streams when their requests end, even if their outboxes are not being read."""
        assert engine.pipeline.exit is not None
        engine.pipeline.exit.on_end.append(self._request_ended)

    @property
    def has_orphans(self) -> bool:
        """Whether a stream waits for its client to come back."""
        return bool(self._orphans)

    async def wait_until_resumed(self, limit_s: float) -> None:
        """Waits until each stream has a socket again or has expired, at most `limit_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._orphans:
                    self._fewer_orphans.clear()
                    await self._fewer_orphans.wait()

    # -- requests in the engine

    def open(self, stream: S, prefix: str, request_id: str) -> str:
        """Registers a request; returns its answer id. Raises as `Service.open` does."""
        answer_id = self.context.service.open(prefix, request_id, stream.owner)
        self._by_answer[answer_id] = stream
        return answer_id

    def close_request(self, answer_id: str, cause: str) -> None:
        """Removes a request, and ends it with `cause` if it is still running."""
        self._by_answer.pop(answer_id, None)
        self.context.service.close(answer_id, cause)

    def abort(self, answer_id: str) -> None:
        """Cancels a request in the engine, if it is running there."""
        if self.context.service.engine is not None:
            self.context.service.engine.abort(answer_id, "cancel")

    def _request_ended(self, outbox: RequestOutbox, cause: str, error: BaseException | None) -> None:
        if (stream := self._by_answer.get(outbox.request_id)) is not None:
            stream.wake()

    # -- streams by token

    def keep(self, stream: S) -> None:
        """Makes the stream available to `find`."""
        assert stream.token is not None
        self._by_token[stream.token] = stream

    def forget(self, stream: S) -> None:
        """Removes the stream."""
        self.take_back(stream)
        if stream.token is not None:
            self._by_token.pop(stream.token, None)

    def adopt(self, stream: S) -> bool:
        """Keeps a stream that has lost its socket.

        False if the server has too many such streams.
        """
        if len(self._orphans) >= MAX_ORPHANS:
            return False
        self._orphans.add(stream)
        return True

    def take_back(self, stream: S) -> None:
        """Marks a stream as connected again."""
        self._orphans.discard(stream)
        self._fewer_orphans.set()

    def find(self, token: str, id: str, owner: str) -> S:
        """The stream with this token, id and owner.

        `ApiError` 404 does not reveal which of them is wrong.
        """
        stream = self._by_token.get(token)
        if stream is None or stream.id != id or not hmac.compare_digest(stream.owner, owner):
            message = "no such request can be resumed: it has expired, or id or token is wrong; create it again"
            raise ApiError("request_not_found", message, param="token")
        return stream
