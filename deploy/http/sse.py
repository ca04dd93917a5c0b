"""A stream of events to one client, which may stop reading and must not be waited for for ever.

Knows sockets, patience and how an event is framed. Refuses to know what the events say.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any

import orjson
from aiohttp import HttpVersion11, web

DONE = b"[DONE]"  # the data of a stream's last event
PING = b": ping\n\n"
HIGH_WATER_BYTES = 64 * 1024  # of a stream's own buffer; above it a write waits for the client to read
SEND_BUFFER_BYTES = 128 * 1024  # of the kernel's, which would grow to megabytes for each client that does not read


def named_event(event: Mapping[str, Any]) -> bytes:
    """An event as it goes over the wire, for those APIs whose events have their type for a name too."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))


class EventStream:
    """Server-sent events on one request. A client that leaves a write waiting for `patience_s` is cut off.

    Text made meanwhile stays in the request's outbox, where it is joined, so a client that does not read costs the
    length of its own answer and holds nobody back.
    """

    def __init__(
        self, request: web.Request, patience_s: float, headers: Mapping[str, str], ping_interval_s: float = 0.0
    ) -> None:
        self.has_stalled = False
        self._request = request
        self._patience_s = patience_s
        self._waiting_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ping_interval_s = ping_interval_s
        self._pinging: asyncio.Task[None] | None = None
        self._num_sent = 0
        self._transport: asyncio.Transport | None = None  # that events in chunks may go to, past aiohttp's writer
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
        self._watch()
        if self._ping_interval_s:
            self._pinging = asyncio.get_running_loop().create_task(self._ping())
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._pinging is not None:
            self._pinging.cancel()

    async def send(self, bodies: Iterable[bytes]) -> None:
        """Sends an event for each of some bodies, in one write. Waits only while the client's buffers are full."""
        await self.write(_framed(bodies))

    async def write(self, events: bytes) -> None:
        """Sends whole events that are framed already. Waits as `send` does."""
        self._num_sent += 1
        self._waiting_since = asyncio.get_running_loop().time()
        await self._response.write(events)
        self._waiting_since = None

    @property
    def can_send_now(self) -> bool:
        """Whether the client has read all that was sent, and something was: then nothing is to be waited for."""
        transport = self._transport
        return (
            transport is not None
            and self._num_sent > 0  # the first goes with the headers
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        )

    def send_now(self, bodies: Iterable[bytes]) -> None:
        """The same as `send`, where `can_send_now`: past aiohttp's writer, which might wait."""
        transport, events = self._transport, b"\n\ndata: ".join(bodies)
        assert transport is not None
        self._num_sent += 1
        transport.write(b"%x\r\ndata: %b\n\n\r\n" % (len(events) + 8, events))

    async def _ping(self) -> None:
        """Sends a comment whenever nothing was sent for a whole interval: no proxy is to take the stream for dead."""
        num_sent = -1
        while True:
            if num_sent == self._num_sent and self._waiting_since is None:
                with contextlib.suppress(ConnectionError):  # whoever sends next hears of it
                    await self._response.write(PING)
            num_sent = self._num_sent
            await asyncio.sleep(self._ping_interval_s)

    async def finish(self) -> web.StreamResponse:
        """Ends the response."""
        if self._pinging is not None:
            self._pinging.cancel()
        self._waiting_since = asyncio.get_running_loop().time()
        await self._response.write_eof()
        self._waiting_since = None
        return self._response

    def _watch(self) -> None:
        """One timer a stream, a few times in its patience: cheaper than a timeout around each of its writes."""
        loop = asyncio.get_running_loop()
        if self._waiting_since is not None and loop.time() - self._waiting_since >= self._patience_s:
            self.has_stalled = True
            if self._request.transport is not None:
                self._request.transport.abort()  # the handler is cancelled, as for any client that leaves
            return
        self._timer = loop.call_later(self._patience_s / 8, self._watch)


def _framed(bodies: Iterable[bytes]) -> bytes:
    return b"data: %b\n\n" % b"\n\ndata: ".join(bodies)


def bound_buffers(request: web.Request) -> None:
    """Bounds what is kept of an answer on its way to the client."""
    transport = request.transport
    if transport is not None:
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


async def stream_framed(
    request: web.Request,
    patience_s: float,
    events: AsyncGenerator[bytes, None],
    headers: Mapping[str, str],
    on_stall: Callable[[], None],
) -> web.StreamResponse:
    """Sends framed events to their end, and closes them however it is left. Nothing is sent before the first are there,
    so that what goes wrong before them still has a status of its own. `on_stall` hears of a client cut off for not
    reading."""
    async with aclosing(events):
        first = await anext(events, b"")
        stream = EventStream(request, patience_s, headers)
        try:
            async with stream:
                await stream.write(first)
                async for more in events:
                    await stream.write(more)
                return await stream.finish()
        except ConnectionError:
            raise asyncio.CancelledError from None  # gone, as a handler hears it otherwise
        finally:
            if stream.has_stalled:
                on_stall()
