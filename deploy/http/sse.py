"""Server-sent events (SSE) to one client, with a time limit on a client that stops reading."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any

import orjson
from aiohttp import HttpVersion11, web

from .answer_record import RECORD, AnswerRecord
from .connections import Connection
from .write_watch import WriteWatch

DONE = b"[DONE]"  # the data of a stream's last event
PING = b": ping\n\n"
HIGH_WATER_BYTES = 64 * 1024  # of the transport's buffer; above it a write waits for the client to read
SEND_BUFFER_BYTES = 128 * 1024  # of the kernel's buffer, which could grow to megabytes for a client that does not read


def named_event(event: Mapping[str, Any]) -> bytes:
    """A framed event whose SSE event name is its `type`, for APIs that send such names."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))


class EventStream:
    """The event stream that answers one request; as a context manager it sends the headers.

    The connection is aborted once a write has waited `stalled_reader_s`; `has_stalled` is then True. While a write
    waits, the request's outbox joins new text. So a client that does not read costs at most the length of its own
    answer and delays no other request.
    """

    def __init__(
        self, request: web.Request, stalled_reader_s: float, headers: Mapping[str, str], ping_interval_s: float = 0.0
    ) -> None:
        self.has_stalled = False
        self._request = request
        self._watch = WriteWatch(stalled_reader_s, self._end_stalled)
        self._ping_interval_s = ping_interval_s
        self._pinging: asyncio.Task[None] | None = None
        self._num_sent = 0
        self._transport: asyncio.Transport | None = None  # target of `send_now`; None if the response is not chunked
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **headers,
            }
        )

    async def __aenter__(self) -> EventStream:
        bound_buffers(self._request)
        if self._request.version >= HttpVersion11:
            self._response.enable_chunked_encoding()
        await self._response.prepare(self._request)
        if self._response.chunked:
            self._transport = self._request.transport
        self._watch.start()
        if self._ping_interval_s:
            self._pinging = asyncio.get_running_loop().create_task(self._ping())
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        self._watch.stop()
        if self._pinging is not None:
            self._pinging.cancel()

    async def send(self, bodies: Iterable[bytes]) -> None:
        """Sends one event for each body, in one write.

        Waits only while the client's buffers are full.
        """
        await self.write(_framed(bodies))

    async def write(self, events: bytes) -> None:
        """Sends whole events that are already framed. Waits as `send` does."""
        self._num_sent += 1
        self._watch.waits_since_s = asyncio.get_running_loop().time()
        await self._response.write(events)
        self._watch.waits_since_s = None

    @property
    def can_send_now(self) -> bool:
        """Whether `send_now` may be called: something was sent, and the transport's buffer is empty."""
        transport = self._transport
        return (
            transport is not None
            and self._num_sent > 0  # the first write includes the headers
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        )

    def send_now(self, bodies: Iterable[bytes]) -> None:
        """Sends without waiting, past aiohttp's writer. Requires `can_send_now`."""
        transport, events = self._transport, b"\n\ndata: ".join(bodies)
        assert transport is not None
        self._num_sent += 1
        transport.write(b"%x\r\ndata: %b\n\n\r\n" % (len(events) + 8, events))

    async def _ping(self) -> None:
        """Sends a comment after each interval without an event, so that proxies keep the stream."""
        num_sent = -1
        while True:
            if num_sent == self._num_sent and self._watch.waits_since_s is None:
                with contextlib.suppress(ConnectionError):  # the next `write` raises it
                    await self._response.write(PING)
            num_sent = self._num_sent
            await asyncio.sleep(self._ping_interval_s)

    async def finish(self) -> web.StreamResponse:
        """Ends the response."""
        if self._pinging is not None:
            self._pinging.cancel()
        self._watch.waits_since_s = asyncio.get_running_loop().time()
        await self._response.write_eof()
        self._watch.waits_since_s = None
        return self._response

    def _end_stalled(self) -> None:
        self.has_stalled = True
        if self._request.transport is not None:
            self._request.transport.abort()  # this cancels the handler, as any disconnect does


class RecordedStream(EventStream):
    """An event stream into a record instead of a connection. It never waits."""

    def __init__(self, request: web.Request, record: AnswerRecord, headers: Mapping[str, str]) -> None:
        super().__init__(request, 1.0, headers)
        self._record, self._headers = record, headers

    async def __aenter__(self) -> EventStream:
        self._record.begin(200, self._headers, is_stream=True)
        return self

    async def write(self, events: bytes) -> None:
        self._record.add(events)

    async def finish(self) -> web.StreamResponse:
        self._record.end()
        return self._response


def event_stream(
    request: web.Request, stalled_reader_s: float, headers: Mapping[str, str], ping_interval_s: float = 0.0
) -> EventStream:
    """The stream that answers a request: to its client, or into the record that it has."""
    record = request.get(RECORD)
    if record is not None:
        return RecordedStream(request, record, headers)
    return EventStream(request, stalled_reader_s, headers, ping_interval_s)


def _framed(bodies: Iterable[bytes]) -> bytes:
    return b"data: %b\n\n" % b"\n\ndata: ".join(bodies)


def bound_buffers(request: web.Request) -> None:
    """Bounds the transport's and the kernel's send buffers of this connection."""
    transport, connection = request.transport, request.protocol
    if transport is not None:
        if not (isinstance(connection, Connection) and connection.writes_through):
            transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


async def stream_framed(
    request: web.Request,
    stalled_reader_s: float,
    events: AsyncGenerator[bytes, None],
    headers: Mapping[str, str],
    on_stall: Callable[[], None],
) -> web.StreamResponse:
    """Sends framed events to the end, and closes `events` in every case.

    The headers are sent with the first events, so that an earlier error still gets its own HTTP status. `on_stall` is
    called if the client is cut off for not reading.
    """
    async with aclosing(events):
        first = await anext(events, b"")
        stream = event_stream(request, stalled_reader_s, headers)
        try:
            async with stream:
                await stream.write(first)
                async for more in events:
                    await stream.write(more)
                return await stream.finish()
        except ConnectionError:
            raise asyncio.CancelledError from None  # as aiohttp reports a disconnect to handlers
        finally:
            if stream.has_stalled:
                on_stall()
