"""The streams of one server: which are under way in the engine, and which wait for their client to come back."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from ..errors import ApiError
from .context import SocketContext

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine
    from ...stages.exit.outboxes import RequestOutbox

MAX_ORPHANS = 1024  # requests whose socket was cut


class Registered(Protocol):
    """A stream, as far as it is looked after here."""

    id: str
    owner: str
    token: str | None

    def wake(self) -> None:
        """Its request has ended in the engine."""

    def stop(self, cause: str) -> None:
        """Ends it at once, with no more messages."""


S = TypeVar("S", bound=Registered)


class StreamRegistry(Generic[S]):
    """One a server, on its loop. `watch` the engine once it is there."""

    def __init__(self, context: SocketContext) -> None:
        self.context = context
        self._by_token: dict[str, S] = {}
        self._orphans: set[S] = set()  # without a socket
        self._by_answer: dict[str, S] = {}  # those under way in the engine

    def watch(self, engine: Engine) -> None:
        """From now on streams hear of their requests' ends, read or not."""
        assert engine.pipeline.exit is not None
        engine.pipeline.exit.on_end.append(self._request_ended)

    def stop_orphans(self, cause: str) -> None:
        """Nobody is waited for who is not there."""
        for stream in list(self._orphans):
            stream.stop(cause)

    # -- in the engine

    def open(self, stream: S, prefix: str, request_id: str) -> str:
        """Counts a request in, as `Service.open`."""
        answer_id = self.context.service.open(prefix, request_id, stream.owner)
        self._by_answer[answer_id] = stream
        return answer_id

    def close_request(self, answer_id: str, cause: str) -> None:
        """Forgets a request, and ends it with `cause` if it had not ended."""
        self._by_answer.pop(answer_id, None)
        self.context.service.close(answer_id, cause)

    def abort(self, answer_id: str) -> None:
        """Ends a request in the engine, if it is there."""
        if self.context.service.engine is not None:
            self.context.service.engine.abort(answer_id, "cancel")

    def _request_ended(self, outbox: RequestOutbox, cause: str, error: BaseException | None) -> None:
        if (stream := self._by_answer.get(outbox.request_id)) is not None:
            stream.wake()

    # -- by its token

    def keep(self, stream: S) -> None:
        """The stream may be asked for by its token."""
        assert stream.token is not None
        self._by_token[stream.token] = stream

    def forget(self, stream: S) -> None:
        """Not any more."""
        self._orphans.discard(stream)
        if stream.token is not None:
            self._by_token.pop(stream.token, None)

    def adopt(self, stream: S) -> bool:
        """The stream has lost its socket. False if it can not be waited for that its client comes back."""
        if self.context.service.is_draining or len(self._orphans) >= MAX_ORPHANS:
            return False
        self._orphans.add(stream)
        return True

    def take_back(self, stream: S) -> None:
        """The stream has a socket again."""
        self._orphans.discard(stream)

    def find(self, token: str, id: str, owner: str) -> S:
        """The stream of that token, if it is the owner's and has that id. `ApiError` 404 tells none of it apart."""
        stream = self._by_token.get(token)
        if stream is None or stream.id != id or not hmac.compare_digest(stream.owner, owner):
            message = "no such request can be resumed: its time has passed, or id or token is wrong; create it anew"
            raise ApiError("request_not_found", message, param="token")
        return stream
