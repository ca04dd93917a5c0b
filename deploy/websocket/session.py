"""Sessions of `/v1/stream` sockets: client messages and the requests they create."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from ..api.chat.answers import ChatAnswerBuilder
from ..api.chat.body import ChatBody
from ..api.completions.answers import CompletionAnswerBuilder
from ..api.completions.body import CompletionBody
from ..api.openai.answers import AnswerBuilder
from ..errors import ApiError, shorten
from ..http.request_context import MAX_ID_CHARS
from .base_session import SocketSession
from .envelopes import (
    KINDS,
    Cancel,
    Create,
    Credit,
    Envelope,
    Resume,
    read_envelope,
)
from .peer import Peer
from .relayed_stream import RelayedStream
from .stream import RequestStream
from .stream_registry import StreamRegistry

# the value of `endpoint` -> the body and the form of the answer
ENDPOINTS: dict[str, tuple[type[ChatBody] | type[CompletionBody], type[AnswerBuilder]]] = {
    "chat": (ChatBody, ChatAnswerBuilder),
    "completions": (CompletionBody, CompletionAnswerBuilder),
}
MAX_KEPT_BYTES = 16 * 1024 * 1024  # unacknowledged messages of one socket, over all its requests


class Session(SocketSession):
    """The running requests of one socket. They end with it, except resumable ones."""

    ABOUT_NOTHING: ClassVar[Mapping[str, Any]] = {"id": None, "in_reply_to": None}

    def __init__(self, registry: StreamRegistry[RequestStream], peer: Peer, owner: str) -> None:
        super().__init__(registry.context, peer, owner)
        self._registry = registry
        self.num_kept = 0  # bytes of messages in the windows of its streams
        self._streams: dict[str, RequestStream] = {}
        self._relayed: dict[str, RelayedStream] = {}  # of other fronts

    @property
    def has_room(self) -> bool:
        """Whether the requests of this session may have more unacknowledged messages."""
        return self.num_kept < MAX_KEPT_BYTES

    def add(self, stream: RequestStream) -> None:
        """Adds a request to this session."""
        self._streams[stream.id] = stream

    def drop(self, stream: RequestStream) -> None:
        """Removes a request from this session, if it is there."""
        if self._streams.get(stream.id) is stream:
            del self._streams[stream.id]
            self.end_if_drained()

    @property
    def is_idle(self) -> bool:
        return not self._streams and all(one.is_done for one in self._relayed.values())

    def leave(self) -> None:
        streams, self._streams = list(self._streams.values()), {}
        cause = "stalled_reader" if self.peer.has_stalled else "disconnect"
        for stream in streams:
            stream.leave(cause, for_good=self.peer.has_left)
        for relayed in self._relayed.values():
            relayed.leave()

    async def take(self, raw: dict[str, Any], num_bytes: int) -> None:
        try:
            note = self._context.service.ignored_fields.note
            envelope = read_envelope(raw, self._context.config.strict_fields, note)
            if not self._forwarded(envelope, raw):
                await self._do(envelope, num_bytes)
        except ApiError as error:
            await self._send_error(error, _what_of(raw))

    def _forwarded(self, envelope: Envelope, raw: dict[str, Any]) -> bool:
        """Whether the message is about a request of another front, and was sent there."""
        service, id = self._context.service, envelope.id
        relayed = self._relayed.get(id)
        if isinstance(envelope, Resume) and service.fronts is not None:
            front = service.front_of(envelope.token)
            if front is not None and relayed is None and id not in self._streams:
                made = RelayedStream(
                    self._context, self.peer, service.fronts, front, raw, partial(self._relay_ended, id)
                )
                self._relayed[id] = made
                return True
        if relayed is None:
            return False
        if isinstance(envelope, Create) and relayed.is_done:
            relayed.leave()
            return False
        relayed.forward(raw)
        return True

    def _relay_ended(self, id: str) -> None:
        relayed = self._relayed.pop(id)
        if relayed.error is not None:
            self._context.spawn(self._send_error(relayed.error, {"id": id, "in_reply_to": "resume"}))
        self.end_if_drained()

    async def _do(self, envelope: Envelope, num_bytes: int) -> None:
        stream = self._streams.get(envelope.id)
        match envelope:
            case Create():
                await self._create(envelope, num_bytes)
            case Resume():
                await self._resume(envelope)
            case Credit() if stream is not None:  # otherwise it has ended, which the client cannot know yet
                stream.grant(envelope.n, envelope.last)
            case Cancel() if stream is not None:
                stream.cancel()

    async def _create(self, create: Create, num_bytes: int) -> None:
        self._context.service.refuse_if_draining()
        self._check_id(create.id)
        limit = self._context.config.ws_max_streams
        if len(self._streams) >= limit:
            message = f"{limit} requests are running on this socket: wait for one to end, or open another socket"
            raise ApiError("rate_limit_exceeded", message, retry_after_s=1.0)
        kind, shape = ENDPOINTS[create.endpoint]
        order = await self._context.compute(
            num_bytes, self._context.generation.order, kind, create.body | {"stream": True}
        )
        self.add(RequestStream(self._registry, self, create, order, shape))

    async def _resume(self, envelope: Resume) -> None:
        stream = self._registry.find(envelope.token, envelope.id, self.owner)
        if self._streams.get(envelope.id) is not stream:
            self._check_id(envelope.id)
        await stream.resume(self, envelope.last, envelope.credit)

    def _check_id(self, id: str) -> None:
        if id in self._streams:
            message = f"id = {shorten(repr(id), 64)}: is in use on this socket; choose a new one"
            raise ApiError("invalid_value", message, param="id")


def _what_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an error that name its cause: id and type of the message, if valid."""
    id, kind = raw.get("id"), raw.get("type")
    known_id = id if isinstance(id, str) and len(id) <= MAX_ID_CHARS else None
    return {"id": known_id, "in_reply_to": kind if isinstance(kind, str) and kind in KINDS else None}
