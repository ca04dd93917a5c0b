"""One WebSocket connection: handshake, messages in both directions, stall limit and close."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from contextlib import suppress

from aiohttp import WSMsgType, web

from ..config import ServerConfig
from ..errors import ApiError
from ..http.connections import LINGER_S, Connection
from ..http.sse import HIGH_WATER_BYTES, bound_buffers
from ..http.websocket_frames import PROTOCOL_ERROR, FrameGuard, text_frame
from ..http.write_watch import WriteWatch
from .envelopes import error_message

PROTOCOL = "millrace.v1"  # a browser that sends its key as a subprotocol must also offer this one
MAX_IN_A_ROW = 16  # messages received before other tasks run; each takes tens of microseconds

# close codes
NORMAL, GOING_AWAY, UNSUPPORTED_DATA, INVALID_PAYLOAD = 1000, 1001, 1003, 1007
INTERNAL_ERROR, TRY_AGAIN_LATER = 1011, 1013

_VIOLATIONS = {1002: "bad_request", 1008: "rate_limit_exceeded", 1009: "body_too_large"}


class Peer:
    """One WebSocket. `open` it, `receive` until None, and `send` from any number of tasks.

    The connection is cut if a write waits for `stalled_reader_s`, or if a ping stays unanswered. Sends only text,
    uncompressed.
    """

    def __init__(self, request: web.Request, config: ServerConfig) -> None:
        self.has_left = False  # the client closed with code 1000, so it will not resume
        self.has_stalled = False
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._guard = FrameGuard(config.max_body_bytes, self._loop.time, self._on_breach)
        self._close_task: asyncio.Task[None] | None = None  # set after a protocol violation
        self._is_closing = False
        self._num_received = 0  # messages
        self._turn = asyncio.Lock()  # held by the one task that waits for the client to read
        self._gathered: list[bytes] = []  # frames to write at the end of this loop iteration
        self._num_gathered = 0  # bytes in `_gathered`
        self._watch = WriteWatch(config.stalled_reader_s, self._end_stalled)
        self.response = web.WebSocketResponse(
            heartbeat=config.ws_ping_interval_s,
            timeout=LINGER_S,
            autoclose=False,
            compress=False,  # NOTE: a few compressed bytes can expand to megabytes
            decode_text=False,
            max_msg_size=config.max_body_bytes + 1,
            protocols=(PROTOCOL,),
        )

    @property
    def headers(self) -> Mapping[str, str]:
        """Of the handshake."""
        return self._request.headers

    async def open(self) -> None:
        """Answers the handshake. `ApiError` if the request is not a valid one."""
        _check_handshake(self._request)
        connection = self._request.protocol
        assert isinstance(connection, Connection)
        connection.guard_frames(self._guard)
        bound_buffers(self._request)
        await self.response.prepare(self._request)
        self._watch.start()

    async def receive(self) -> bytes | None:
        """The next text message, not checked for UTF-8; None once the socket is closed or closing."""
        self._num_received += 1
        if self._num_received % MAX_IN_A_ROW == 0:
            await asyncio.sleep(0)  # receiving buffered messages never waits: let other tasks run
        message = await self.response.receive()
        if message.type is WSMsgType.TEXT:
            return bytes(message.data)
        if message.type is WSMsgType.BINARY:
            error = ApiError("unsupported_media_type", "a message is binary: send JSON as text")
            await self.end(UNSUPPORTED_DATA, error)
        if message.type is WSMsgType.CLOSE:
            self.has_left = message.data == NORMAL
            code = message.data or NORMAL
            code = code if _may_be_sent(code) else PROTOCOL_ERROR
            self._flush()
            await self.response.close(code=code, drain=False)  # RFC 6455: echo the client's close code
        return None

    async def send(self, message: bytes) -> None:
        """Sends one text message.

        Waits while the client's buffers are full. `ConnectionError` after a disconnect. If the client has read
        everything so far, `send` does not wait: the messages of all tasks in one loop iteration go out in one
        write.
        """
        if self._can_gather:
            self._gather(message)
            return
        async with self._turn:
            if self._is_closing:
                raise ConnectionResetError("the socket is closing")
            await self._write(message, WSMsgType.TEXT)

    @property
    def _can_gather(self) -> bool:
        transport = self._request.transport
        return (
            not (self._is_closing or self._turn.locked() or self.response.closed)
            and self._num_gathered < HIGH_WATER_BYTES
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        )

    def _gather(self, message: bytes) -> None:
        if not self._gathered:
            self._loop.call_soon(self._flush)
        self._gathered.append(text_frame(message))
        self._num_gathered += len(message)

    def _flush(self) -> None:
        """Writes the gathered frames, unless the transport is closed."""
        frames, transport = b"".join(self._gathered), self._request.transport
        self._gathered.clear()
        self._num_gathered = 0
        if frames and transport is not None and not transport.is_closing():
            transport.write(frames)

    async def end(self, code: int, error: ApiError) -> None:
        """Sends the error as a last message, then closes with `code`.

        Input is still received, and dropped, for up to `LINGER_S`. Otherwise a client that is sending would get a
        connection reset before it reads the error.
        """
        if self._is_closing:
            return
        self._is_closing = True
        self._guard.close()
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(LINGER_S):
                async with self._turn:
                    await self._write(error_message(error, {"id": None}), WSMsgType.TEXT)
                    await self._write(struct.pack("!H", code) + error.code.encode(), WSMsgType.CLOSE)
                await asyncio.Event().wait()  # until the client closes, which cancels this task
        self._abort()

    async def release(self) -> None:
        """Closes the transport and frees all state; called once, when the session is over.

        Otherwise a partly received message would stay in memory until aiohttp's next ping fails.
        """
        self._watch.stop()
        if self._close_task is not None:
            self._close_task.cancel()
        self._abort() if self.has_stalled else self._close()
        self._guard.reader = None
        await self.response.close(drain=False)  # stops the pings; writes nothing, as the transport is closing

    async def _write(self, payload: bytes, kind: WSMsgType) -> None:
        self._flush()
        self._watch.waits_since_s = self._loop.time()
        try:
            await self.response.send_frame(payload, kind)
        finally:
            self._watch.waits_since_s = None

    def _on_breach(self, code: int, reason: str) -> None:
        self._close_task = self._loop.create_task(self.end(code, ApiError(_VIOLATIONS[code], reason)))

    def _close(self) -> None:
        self._flush()
        if self._request.transport is not None:
            self._request.transport.close()

    def _abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()  # this cancels the handler, as any disconnect does

    def _end_stalled(self) -> None:
        self.has_stalled = True
        self._abort()


def _may_be_sent(code: int) -> bool:
    """Whether a close frame may have this code (RFC 6455, section 7.4)."""
    return code in range(3000, 5000) or (code in range(1000, 1015) and code not in (1004, 1005, 1006))


def _check_handshake(request: web.Request) -> None:
    if request.headers.get("Upgrade", "").lower() != "websocket":
        headers = {"Upgrade": "websocket", "Connection": "Upgrade"}
        raise ApiError("upgrade_required", "this route accepts WebSocket handshakes only", headers=headers)
    # NOTE: checked before aiohttp does, which would log unknown names, keys included
    offered = request.headers.get("Sec-WebSocket-Protocol")
    if offered is not None and PROTOCOL not in (name.strip() for name in offered.split(",")):
        raise ApiError("bad_request", f"Sec-WebSocket-Protocol must offer {PROTOCOL}, also beside a key")
