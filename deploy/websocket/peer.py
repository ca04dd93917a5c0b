"""The client at the other end of one WebSocket: messages in, messages out, patience, and how it ends.

Knows WebSockets. Refuses to know what the messages mean.
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress

from aiohttp import WSMsgType, web

from ..config import ServerConfig
from ..errors import ApiError
from ..http.connections import LINGER_S, Connection
from ..http.sse import HIGH_WATER_BYTES, bound_buffers
from ..http.websocket_frames import PROTOCOL_ERROR, FrameGuard, text_frame
from .envelopes import error_message

PROTOCOL = "millrace.v1"  # the subprotocol of a browser that sends its key as another; nobody else need name one
MAX_IN_A_ROW = 16  # messages received before others have a turn; each costs tens of microseconds

# close codes
NORMAL, GOING_AWAY, UNSUPPORTED_DATA, INVALID_PAYLOAD = 1000, 1001, 1003, 1007
INTERNAL_ERROR, TRY_AGAIN_LATER = 1011, 1013

_VIOLATIONS = {1002: "bad_request", 1008: "rate_limit_exceeded", 1009: "body_too_large"}


class Peer:
    """One WebSocket. `open` it, `receive` until None, and `send` from any number of tasks.

    A client that leaves a message unread for `stalled_reader_s` is cut off, and so is one that leaves a ping
    unanswered. What leaves this end is text only, uncompressed.
    """

    def __init__(self, request: web.Request, config: ServerConfig) -> None:
        self.has_left = False  # with the close code of somebody who will not come back
        self.has_stalled = False
        self._request = request
        self._patience_s = config.stalled_reader_s
        self._loop = asyncio.get_running_loop()
        self._guard = FrameGuard(config.max_body_bytes, self._loop.time, self._on_breach)
        self._ending: asyncio.Task[None] | None = None  # after a breach
        self._is_ending = False
        self._num_received = 0  # messages
        self._turn = asyncio.Lock()  # one at a time waits for the client to read; the others wait for their turn
        self._gathered: list[bytes] = []  # frames to be written when this turn of the loop is over
        self._num_gathered = 0  # bytes of them
        self._waiting_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.response = web.WebSocketResponse(
            heartbeat=config.ws_ping_interval_s,
            timeout=LINGER_S,
            autoclose=False,
            compress=False,  # a few bytes could ask for megabytes
            decode_text=False,
            max_msg_size=config.max_body_bytes + 1,
            protocols=(PROTOCOL,),
        )

    async def open(self) -> None:
        """Answers the handshake. `ApiError` if it is none."""
        _check_handshake(self._request)
        connection = self._request.protocol
        assert isinstance(connection, Connection)
        connection.guard_frames(self._guard)
        bound_buffers(self._request)
        await self.response.prepare(self._request)
        self._watch()

    async def receive(self) -> bytes | None:
        """The next message, in UTF-8 or not; None after the last."""
        self._num_received += 1
        if self._num_received % MAX_IN_A_ROW == 0:
            await asyncio.sleep(0)  # what is there already is received without waiting: let others have a turn
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
            await self.response.close(code=code, drain=False)  # its own code, as it expects
        return None

    async def send(self, message: bytes) -> None:
        """Sends one text message. Waits while the client's buffers are full. `ConnectionError` once it is gone.

        To a client that has read all so far nothing is to be waited for: what all tasks send in one turn of the loop
        goes in one write."""
        if self._can_gather:
            self._gather(message)
            return
        async with self._turn:
            if self._is_ending:
                raise ConnectionResetError("nothing may follow the close")
            await self._write(message, WSMsgType.TEXT)

    @property
    def _can_gather(self) -> bool:
        transport = self._request.transport
        return (
            not (self._is_ending or self._turn.locked() or self.response.closed)
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
        """Writes what was gathered, if anybody is there."""
        frames, transport = b"".join(self._gathered), self._request.transport
        self._gathered.clear()
        self._num_gathered = 0
        if frames and transport is not None and not transport.is_closing():
            transport.write(frames)

    async def end(self, code: int, error: ApiError) -> None:
        """Ends it for a reason: the error as a last message, then the close code. Nothing that still arrives is read,
        but it is let in for a moment, or the client's own sending would cost it the answer."""
        if self._is_ending:
            return
        self._is_ending = True
        self._guard.close()
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(LINGER_S):
                async with self._turn:
                    await self._write(error_message(error, {"id": None}), WSMsgType.TEXT)
                    await self._write(struct.pack("!H", code) + error.code.encode(), WSMsgType.CLOSE)
                await asyncio.Event().wait()  # for the client to close: this task is cancelled then
        self._abort()

    async def release(self) -> None:
        """Whoever served it is done with it, and nothing of it is kept: what had come of a message would be, until
        aiohttp's next ping to a client that is gone."""
        if self._timer is not None:
            self._timer.cancel()
        if self._ending is not None:
            self._ending.cancel()
        self._abort() if self.has_stalled else self._close()
        self._guard.reader = None
        await self.response.close(drain=False)  # writes nothing, as the transport is closing: it stops the pings

    async def _write(self, payload: bytes, kind: WSMsgType) -> None:
        self._flush()
        self._waiting_since = self._loop.time()
        try:
            await self.response.send_frame(payload, kind)
        finally:
            self._waiting_since = None

    def _on_breach(self, code: int, reason: str) -> None:
        self._ending = self._loop.create_task(self.end(code, ApiError(_VIOLATIONS[code], reason)))

    def _close(self) -> None:
        self._flush()
        if self._request.transport is not None:
            self._request.transport.close()

    def _abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()  # the handler is cancelled, as for any client that leaves

    def _watch(self) -> None:
        """One timer a socket, a few times in its patience."""
        now = self._loop.time()
        if self._waiting_since is not None and now - self._waiting_since >= self._patience_s:
            self.has_stalled = True
            self._abort()
            return
        self._timer = self._loop.call_later(self._patience_s / 8, self._watch)


def _may_be_sent(code: int) -> bool:
    """Whether a peer may close with that code (RFC 6455, 7.4): others are reserved, or are none."""
    return code in range(3000, 5000) or (code in range(1000, 1015) and code not in (1004, 1005, 1006))


def _check_handshake(request: web.Request) -> None:
    if request.headers.get("Upgrade", "").lower() != "websocket":
        headers = {"Upgrade": "websocket", "Connection": "Upgrade"}
        raise ApiError("upgrade_required", "this route speaks WebSocket only", headers=headers)
    # looked at before aiohttp does, which would log names that it does not know, keys included
    offered = request.headers.get("Sec-WebSocket-Protocol")
    if offered is not None and PROTOCOL not in (name.strip() for name in offered.split(",")):
        raise ApiError("bad_request", f"the only subprotocol known here is {PROTOCOL}: name it, beside one with a key")
