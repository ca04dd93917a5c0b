"""One request of a `/v1/stream` socket: flow control, cancellation and the end.

A stream reads the request's outbox only while its client has credit and room. The schedule stage parks a request whose
outbox is not read, so it takes no further KV blocks.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any, Protocol

from ...runtime.env.awake_time import AwakeTimer
from ...runtime.env.log import bound
from ..api.openai.answers import AnswerBuilder
from ..api.openai.chunks import ChunkIterator
from ..api.openai.prepared_request import PreparedRequest, stream_error
from ..errors import ApiError, not_serving
from ..http.request_context import checked_request_id
from .delivery import ChunkDelivery, Recipient
from .envelopes import Create, error_members, members
from .stream_registry import StreamRegistry

if TYPE_CHECKING:
    from ...stages.exit.outboxes import RequestOutbox


class StreamCancelled(Exception):
    """The client has cancelled the request."""


class StreamSession(Recipient, Protocol):
    """The session that a stream belongs to."""

    owner: str  # the owner id of its API key

    def add(self, stream: RequestStream) -> None:
        """Adds a request to this session."""

    def drop(self, stream: RequestStream) -> None:
        """Removes a request from this session, if it is there."""


class RequestStream:
    """A request and the task that sends its answer to the client.

    It belongs to the session that created it. With a `token`, it survives the session for `ws_resume_window_s` and may
    continue in another one.
    """

    def __init__(
        self,
        registry: StreamRegistry[RequestStream],
        session: StreamSession,
        create: Create,
        order: PreparedRequest,
        shape: type[AnswerBuilder],
    ) -> None:
        self.id = create.id
        self.owner = session.owner
        self.token = registry.context.service.mark + secrets.token_urlsafe(18) if create.resume else None
        self.delivery: ChunkDelivery[StreamSession] = ChunkDelivery(create.id, session, keep=create.resume)
        self._registry = registry
        self._context = registry.context
        self._order = order
        self._shape = shape
        self._credit = create.credit
        self._wants_stats = create.stats
        self._is_cancelled = False
        self._is_done = False  # the last message is made
        self._answer_id = ""
        self._outbox: RequestOutbox | None = None
        self._cause = "disconnect"  # reported to the engine if the request ends outside it
        self._expiry: AwakeTimer | None = None
        self._starving: AwakeTimer | None = None  # while it waits for room with a connected client
        self._has_starved = False  # for too long
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._first_s: float | None = None
        self._starved_s = 0.0
        self._num_chunks = 0
        if create.resume:
            registry.keep(self)
        self._task = self._context.spawn(self._run())

    # -- messages of the client

    def grant(self, n: int, last: int | None) -> None:
        """Adds `n` chunks of credit and acknowledges messages up to `last`.

        `ApiError` if `last` was never sent.
        """
        if last is not None:
            self.delivery.acknowledge(last)
        if self._credit is not None:
            self._credit += n
        self.delivery.wakeup.set()
        if self._is_done and self.delivery.is_acknowledged:
            self._forget()

    def cancel(self) -> None:
        """Cancels the request: `usage` and `done` come next, even if chunks are waiting."""
        self._is_cancelled = True
        self._registry.abort(self._answer_id)
        self.delivery.wakeup.set()

    async def resume(self, session: StreamSession, last: int, credit: int | None) -> None:
        """Continues in another session after message `last`, with new credit if it is given.

        `ApiError` if the messages after `last` are not kept.
        """
        self.delivery.check_resumption(last)
        former = self.delivery.session
        if former is not None and former is not session:
            former.drop(self)
        self._stop_expiry()
        if credit is not None:
            self._credit = max(0, credit - self.delivery.num_after(last))
        session.add(self)
        await self.delivery.resume(session, last)
        if self.delivery.session is session:  # not before: a drain ends once no stream waits for its client
            self._registry.take_back(self)
        if self._is_done:
            self._expire_later()

    # -- events of the session and the engine

    def leave(self, cause: str, for_good: bool) -> None:
        """Handles the end of the session: the request ends too, unless it may be resumed."""
        self.delivery.leave()
        if for_good or self.token is None or not self._registry.adopt(self):
            self.stop(cause)
        elif self._expiry is None:
            self._expire_later()

    def stop(self, cause: str = "disconnect") -> None:
        """Ends the request at once, without further messages."""
        self._cause = cause
        self._forget()
        self._task.cancel()

    def wake(self) -> None:
        """Wakes the stream, as its request has ended in the engine."""
        self.delivery.wakeup.set()

    def _expire_later(self) -> None:
        self._stop_expiry()
        self._expiry = AwakeTimer(self._context.config.ws_resume_window_s, self.stop)

    def _stop_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _forget(self) -> None:
        """Removes the stream from the registry and from its session."""
        self._stop_expiry()
        self._registry.forget(self)
        if self.delivery.session is not None:
            self.delivery.session.drop(self)

    # -- its task

    async def _run(self) -> None:
        request_id = checked_request_id(self._order.body.request_id or self.id)
        with bound(request_id=request_id):
            try:
                self._answer_id = self._registry.open(self, self._shape.PREFIX, request_id)
                await self._answer()
            except Exception as error:
                if self._cause == "disconnect":
                    self._cause = "error"
                known = stream_error(self._order, error, request_id)
                self._context.metrics.count_rejection(known.code)
                await self._put_last(b"error", error_members(known))
            finally:
                if self._answer_id:
                    self._registry.close_request(self._answer_id, self._cause)

    async def _answer(self) -> None:
        generation, order = self._context.generation, self._order
        await self.delivery.send_unnumbered(b"created", self._created())
        self._outbox = await generation.submit(self._answer_id, order)
        answer = generation.answer(self._shape, self._answer_id, order, self._outbox)
        chunks = generation.chunks(order, answer, self._outbox)
        reason = b"finish"
        try:
            await self._send_all(chunks)
        except StreamCancelled:
            self._cause, reason = "cancel", b"cancel"
        await self.delivery.put(b"usage", members({"usage": chunks.usage()}))
        if self._wants_stats:
            await self.delivery.put(b"stats", self._stats())
        await self._put_last(b"done", b'"reason":"%b"' % reason)

    async def _send_all(self, chunks: ChunkIterator) -> None:
        while not chunks.is_over():
            await self._wait_for_room()
            for body in await anext(chunks):
                await self._wait_for_room()
                if self._credit is not None:
                    self._credit -= 1
                self._num_chunks += 1
                self._first_s = self._first_s or self._loop.time()
                await self.delivery.put(b"chunk", b'"body":' + body)

    async def _put_last(self, kind: bytes, members: bytes) -> None:
        """Sends the last message. Frees the id before that, unless the request may be resumed."""
        self._is_done = True
        if self.token is None:
            self._forget()
        else:
            self._expire_later()
        await self.delivery.put(kind, members)

    # -- waiting

    async def _wait_for_room(self) -> None:
        """Waits for credit, room in the window and a connected client.

        Raises the error that ends the request meanwhile; `ApiError` after `stalled_reader_s` with a connected client.
        """
        if not self._is_cancelled and self._has_room():
            return
        began_s = self._loop.time()
        try:
            while self._is_cancelled or not self._has_room():
                self._check_alive()
                self._limit_starving()
                self.delivery.wakeup.clear()
                await self.delivery.wakeup.wait()
        finally:
            self._end_starving()
        self._starved_s += self._loop.time() - began_s

    def _limit_starving(self) -> None:
        """While a client is connected, the time without room is limited; else the resume window limits it."""
        if not self.delivery.is_open:
            self._end_starving()
        elif self._starving is None:
            self._starving = AwakeTimer(self._context.config.stalled_reader_s, self._note_starved)

    def _end_starving(self) -> None:
        self._has_starved = False
        if self._starving is not None:
            self._starving.cancel()
            self._starving = None

    def _note_starved(self) -> None:
        self._has_starved = True
        self.wake()

    def _has_room(self) -> bool:
        return (self._credit is None or self._credit > 0) and self.delivery.has_room

    def _check_alive(self) -> None:
        """Raises if the request has ended.

        The outbox would report the end, but it is not read while there is no room.
        """
        if self._is_cancelled:
            raise StreamCancelled
        if self._has_starved:
            self._cause = "stalled_reader"
            raise self._stalled()
        if self._outbox is None or self._outbox.cause in (None, "finish"):
            return
        if self._outbox.error is not None:
            raise self._outbox.error
        if self._outbox.cause == "stalled_reader":
            raise self._stalled()
        if self._outbox.cause == "server_shutdown":
            raise not_serving(self._context.service.health)
        raise StreamCancelled

    def _stalled(self) -> ApiError:
        message = "the request waited too long for credit or for acknowledgement of its messages: send credit"
        return ApiError("stalled_reader", message)

    # -- messages to the client

    def _created(self) -> bytes:
        fields: dict[str, Any] = {"request_id": self._answer_id}
        if self.token is not None:
            fields |= {"token": self.token, "resume_window_s": self._context.config.ws_resume_window_s}
        if self._order.ignored:
            fields["ignored_fields"] = [name[:64] for name in self._order.ignored[:32]]
        return members(fields)

    def _stats(self) -> bytes:
        first_s = None if self._first_s is None else round(self._first_s - self._began_s, 6)
        fields = {
            "ttft_s": first_s,
            "duration_s": round(self._loop.time() - self._began_s, 6),
            "starved_s": round(self._starved_s, 6),  # time without room for the next chunk
            "num_chunks": self._num_chunks,
        }
        return members(fields)
