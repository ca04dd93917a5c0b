"""Client connections, with limits that apply before a request exists.

aiohttp's protocol lacks a bound on the whole header block, a time limit on it, a bound on connections, and errors in
this server's shape. The classes here add them.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from ...runtime.env.awake_time import AwakeTimer
from ..errors import ApiError
from .websocket_frames import FrameGuard

MAX_HEADER_LINE = 8 * 1024
MAX_HEADER_BLOCK = 16 * 1024
MAX_HEADERS = 100
MAX_READ = 16 * 1024  # bytes a parser call: the shortest chunks take 10 ms in 16 KiB, and 170 ms in 256 KiB
ASCII_HEADERS = ("Expect", "Upgrade", "Connection", "Sec-WebSocket-Version", "Sec-WebSocket-Key")  # see `not_ascii`
CONTINUE = "100-continue"
NUM_RESERVED = 16  # connections above the limit that may ask for health, and nothing else
MIN_IDLE_S = 1.0  # a connection that has been idle for so long may be closed to make room for another
CLOSED_AT_ONCE = 32  # idle connections, the longest idle ones first
LINGER_S = 1.0  # reads on for so long after an early answer, so that the client receives it


class Connection(web.RequestHandler):
    """aiohttp's connection, with a limit on the header block in bytes and in time."""

    __slots__ = ("_frame_guard", "_header_bytes", "_header_timeout_s", "_header_timer", "is_reserved", "writes_through")

    def __init__(self, manager: web.Server, *, header_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._header_timeout_s = header_timeout_s
        self._header_timer: AwakeTimer | None = None
        self._header_bytes = 0
        self._frame_guard: FrameGuard | None = None
        self.writes_through = False  # a write waits until its bytes have left this process
        self.is_reserved = False  # made although there are too many: for health only

    def guard_frames(self, guard: FrameGuard) -> None:
        """Passes the frames of the upcoming WebSocket through `guard` before aiohttp parses them."""
        self._frame_guard = guard

    @property
    def idle_since_s(self) -> float | None:
        """Since when it waits for a request, by the loop's clock; None while it has one, or the beginning of one."""
        if not self._is_between_requests() or self._header_bytes:
            return None
        return self._next_keepalive_close_time - self._keepalive_timeout

    @property
    def has_more_requests(self) -> bool:
        """Whether pipelined requests wait behind the current one."""
        return bool(self._messages)

    def set_parser(self, parser: Any, data_received_cb: Callable[[], None] | None = None) -> None:
        """Called by aiohttp with the parser of all later bytes; the frame guard is put before it."""
        if self._frame_guard is not None:
            self._frame_guard.reader, parser = parser, self._frame_guard
        super().set_parser(parser, data_received_cb)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if hasattr(transport, "max_size"):  # asyncio's own transports have it, uvloop's do not
            transport.max_size = MAX_READ
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self._is_between_requests():
            super().data_received(data)
            return
        room = MAX_HEADER_BLOCK - self._header_bytes
        super().data_received(data[:room])
        if self._has_message():
            self._end_headers()
            if len(data) > room:
                super().data_received(data[room:])
        elif len(data) > room:
            limit = ApiError("headers_too_large", f"the header block is longer than {MAX_HEADER_BLOCK} bytes")
            self._answer_and_close(limit)
        elif data:
            self._header_bytes += len(data)
            if self._header_timer is None:
                self._header_timer = AwakeTimer(self._header_timeout_s, self._headers_timed_out)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._end_headers()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """aiohttp's answer to malformed HTTP, or to an exception that no handler caught.

        `ConnectionError` if the answer has begun: aiohttp then closes the connection.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun: the connection can only be closed")
        if isinstance(exc, LineTooLong):
            error = ApiError("headers_too_large", f"a header line is longer than {MAX_HEADER_LINE} bytes")
        elif status == 400:
            error = ApiError("bad_request", "the request is not well-formed HTTP")
        else:
            self.log_exception("unhandled error", exc_info=exc)
            error = ApiError("internal_error", "internal error")
        return closing_response(error)

    def _is_between_requests(self) -> bool:
        """Whether the next bytes are headers: no request is queued, running or sending its body."""
        return self._waiter is not None and not self._waiter.done() and not self._messages

    def _has_message(self) -> bool:
        return bool(self._messages) or self._force_close or self._close

    def _end_headers(self) -> None:
        self._header_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_timed_out(self) -> None:
        self._header_timer = None
        if self._is_between_requests():
            message = f"the headers did not arrive within {self._header_timeout_s:g} s"
            self._answer_and_close(ApiError("request_timeout", message))

    def _answer_and_close(self, error: ApiError) -> None:
        self._end_headers()
        if self.transport is not None:
            self.transport.write(raw_response(error))
        self.force_close()


class Listener(web.Server):
    """Creates the connections of one server, at most `max_connections` at a time.

    Above that, idle ones are closed. If none is idle, `NUM_RESERVED` more may ask for the paths in `probes`; all others
    are refused.
    """

    def __init__(
        self,
        handler: Callable[[Any], Awaitable[web.StreamResponse]],
        *,
        max_connections: int,
        probes: Collection[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(self._handle, **kwargs)
        self._handler = handler
        self._max_connections = max_connections
        self._probes = probes
        self._closing: set[web.RequestHandler] = set()  # by `close_idle`; they are still among the connections
        self._writes_through = False

    def __call__(self) -> Connection:
        return Connection(self, loop=self._loop, **self._kwargs)

    def write_through(self) -> None:
        """From now on a write to any connection waits until its buffer in this process is empty."""
        self._writes_through = True
        for connection, transport in self._connections.items():
            _write_through(connection, transport)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if self._writes_through:
            _write_through(handler, transport)
        if len(self._connections) <= self._max_connections or self.num_open <= self._max_connections:
            return
        if self.close_idle():
            return
        if self.num_open <= self._max_connections + NUM_RESERVED:
            assert isinstance(handler, Connection)
            handler.is_reserved = True
        else:
            transport.write(raw_response(_too_many()))
            transport.close()

    @property
    def num_open(self) -> int:
        """The number of connections, without those that are being closed."""
        self._closing.intersection_update(self._connections)
        return len(self._connections) - len(self._closing)

    def close_idle(self) -> int:
        """Closes the connections that have been idle the longest. Returns how many."""
        latest_s = self._loop.time() - MIN_IDLE_S
        idle = (
            (since_s, connection)
            for connection in self._connections
            if isinstance(connection, Connection)
            and (since_s := connection.idle_since_s) is not None
            and since_s <= latest_s
        )
        chosen = heapq.nsmallest(CLOSED_AT_ONCE, idle, key=lambda pair: pair[0])
        for _, connection in chosen:
            connection.force_close()
            self._closing.add(connection)
        return len(chosen)

    def close_all_idle(self) -> None:
        """Closes the connections that wait for a request."""
        for connection in list(self._connections):
            if isinstance(connection, Connection) and connection.idle_since_s is not None:
                connection.force_close()
                self._closing.add(connection)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Checks headers that aiohttp mishandles, then calls the handler.

        Yields to the loop between pipelined requests. Since Python 3.12 aiohttp runs a handler at once, so the 300 and
        more requests of one read would otherwise run in one turn of the loop.
        """
        connection = request.protocol
        assert isinstance(connection, Connection)
        if connection.is_reserved:
            response = await self._handler(request) if request.path in self._probes else closing_response(_too_many())
            response.force_close()
            return response
        if connection.has_more_requests:
            await asyncio.sleep(0)
        if name := not_ascii(request):
            error = ApiError("bad_request", f"the header {name} has non-ASCII bytes: remove them")
            return closing_response(error)
        if any(value.lower() not in ("", CONTINUE) for value in request.headers.getall("Expect", ())):
            return closing_response(ApiError("expectation_failed", f"the Expect header must be {CONTINUE}"))
        return await self._handler(request)


def _too_many() -> ApiError:
    return ApiError("too_many_connections", "too many connections; try again shortly", retry_after_s=1.0)


def _write_through(connection: web.RequestHandler, transport: asyncio.Transport) -> None:
    assert isinstance(connection, Connection)
    connection.writes_through = True
    transport.set_write_buffer_limits(0)


def not_ascii(request: web.BaseRequest) -> str | None:
    """The first of `ASCII_HEADERS` that has non-ASCII bytes, or None.

    HTTP forbids such bytes there. aiohttp raises unexpected exceptions for them: it cannot encode an error that quotes
    them, and does not catch the error of decoding `Sec-WebSocket-Key`.
    """
    for name in ASCII_HEADERS:
        if not all(value.isascii() for value in request.headers.getall(name, ())):
            return name
    return None


def closing_response(error: ApiError) -> web.Response:
    """The response to an error outside all routes and middleware; the connection then closes."""
    response = error_response(error)
    response.headers.update({"Server": "millrace", "X-Content-Type-Options": "nosniff"})
    response.force_close()
    return response


def error_response(error: ApiError, body: Mapping[str, Any] | None = None) -> web.Response:
    """An error as a response; `body` replaces the error's own body."""
    data = orjson.dumps(error.body() if body is None else body)
    return web.Response(status=error.status, body=data, content_type="application/json", headers=error.headers)


def raw_response(error: ApiError) -> bytes:
    """An error as the bytes of a whole response, for a connection without a request."""
    body = orjson.dumps(error.body())
    lines = [
        f"HTTP/1.1 {error.status} {error.code}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in error.headers.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body
