"""A TLS connection over a socket: its handshake, and then the transport of a link."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from .frames import ALERT_RECORD, HANDSHAKE_RECORD
from .tls import FleetTls, TlsError
from .transport import SocketTransport

RECORD_BYTES = 1 << 14  # of TLS, at most
SEND_BYTES = 1 << 18  # that are encrypted at once
MAX_HANDSHAKE_BYTES = 1 << 17  # of an end that has not shown its certificate
NO_TLS = ALERT_RECORD + b"\x03\x00\x02\x02\x28"  # the alert "handshake failure": such an end may know that this is TLS


class TlsStream:
    """A socket with TLS before a link has it. Call `shake_hands`, and in the end `transport`."""

    def __init__(self, sock: socket.socket, tls: FleetTls, server_name: str | None = None) -> None:
        self._sock, self._tls = sock, tls
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._connection = tls.connection(self._incoming, self._outgoing, server_name)
        self._num_received = 0

    async def shake_hands(self) -> None:
        """Raises `TlsError` if one end refuses the other, and OSError."""
        is_over = False
        while not is_over:
            try:
                self._connection.do_handshake()
                is_over = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                await self._send()  # the alert that says why
                raise TlsError(self._tls.why(error)) from None
            await self._send()
            if not is_over and not await self._receive():
                raise TlsError("it closed the connection before it has shown its certificate; its own log says why")

    async def recv(self, num_bytes: int) -> bytes:
        """Up to so many bytes, as soon as there are some; b"" at the end. Raises `TlsError`, and OSError."""
        while True:
            try:
                return self._connection.read(num_bytes)
            except ssl.SSLWantReadError:
                if not await self._receive():
                    return b""
            except ssl.SSLZeroReturnError:
                return b""
            except ssl.SSLError as error:
                raise TlsError(self._tls.why(error)) from None

    async def sendall(self, data: bytes) -> None:
        """Sends it all. Raises OSError."""
        self._connection.write(data)
        await self._send()

    def transport(self) -> TlsTransport:
        """The connection for a link, from where this one stands; it owns the socket then."""
        return TlsTransport(self._sock, self._tls, self._connection, self._incoming, self._outgoing)

    async def _send(self) -> None:
        if data := self._outgoing.read():
            await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def _receive(self) -> bytes:
        """What the other end sent next, which may be the middle of a record."""
        data = await asyncio.get_running_loop().sock_recv(self._sock, RECORD_BYTES)
        if not self._num_received and not _is_tls(data):
            if self._tls.role == "listener":
                await asyncio.get_running_loop().sock_sendall(self._sock, NO_TLS)
            raise TlsError("it does not speak TLS and this end does; start both with the files of TLS, or none")
        self._num_received += len(data)
        if self._num_received > MAX_HANDSHAKE_BYTES:
            raise TlsError(f"it sent over {MAX_HANDSHAKE_BYTES} bytes before its proof")
        self._incoming.write(data)
        return data


def _is_tls(data: bytes) -> bool:
    return any(data[:2] == record[: len(data)] for record in (HANDSHAKE_RECORD, ALERT_RECORD))


class TlsTransport(SocketTransport):
    """A connected socket whose bytes are encrypted, behind its handshake; see `Transport`.

    What was encrypted must be sent as it is. So `send` takes a piece once all of it is in the socket: after one that
    did not take all, the next call must begin with the bytes that were left.
    """

    def __init__(
        self,
        sock: socket.socket,
        tls: FleetTls,
        connection: ssl.SSLObject,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
    ) -> None:
        super().__init__(sock)
        self._tls, self._connection = tls, connection
        self._incoming, self._outgoing = incoming, outgoing
        self._rest = memoryview(b"")  # encrypted, and not in the socket
        self._num_ahead = 0  # bytes of the next `send` that are in `_rest`
        self._owes_room = False  # `on_writable` is to be called
        self._has_ended = False
        self._on_readable: Callable[[], None] = lambda: None
        self._on_room: Callable[[], None] = lambda: None

    def start(
        self, on_readable: Callable[[], None], on_writable: Callable[[], None], timeout_s: float | None = None
    ) -> None:
        self._on_readable, self._on_room = on_readable, on_writable
        super().start(on_readable, self._on_socket_writable, timeout_s)
        asyncio.get_running_loop().call_soon(self._read_on)  # the handshake may have received frames already

    def recv(self) -> bytes | None:
        """As `Transport.recv`; it may be the rest of a record more."""
        if self._has_ended:
            return b""
        data, pieces = super().recv(), list[bytes]()
        if data:
            self._incoming.write(data)
        incoming, connection = self._incoming, self._connection
        try:
            is_left = True
            while is_left and (piece := connection.read(RECORD_BYTES)):
                pieces.append(piece)
                is_left = bool(incoming.pending or connection.pending())  # cheaper than the exception
            self._has_ended = is_left or data == b""
        except ssl.SSLWantReadError:
            self._has_ended = data == b""
        except ssl.SSLZeroReturnError:
            self._has_ended = True
        except ssl.SSLError as error:
            self._has_ended, self.failure = True, self._tls.why(error)
        if self._outgoing.pending:
            self._answer()
        if not pieces:
            return b"" if self._has_ended else None
        if self._has_ended and self._loop is not None:
            self._loop.call_soon(self._read_on)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def send(self, data: memoryview) -> int:
        self._owes_room = True  # if it returns early
        if not self._flush():
            return 0
        sent, self._num_ahead = self._num_ahead, 0
        while sent < len(data):
            piece = data[sent : sent + SEND_BYTES]
            self._connection.write(piece)
            self._rest = memoryview(self._outgoing.read())
            if not self._flush():
                self._num_ahead = len(piece)
                return sent
            sent += len(piece)
        self._owes_room = False
        return sent

    def _flush(self) -> bool:
        """Moves encrypted bytes into the socket; returns whether all are there."""
        if self._rest:
            self._rest = self._rest[super().send(self._rest) :]
        return not self._rest

    def _answer(self) -> None:
        """Sends what TLS itself answers to what came, such as new keys."""
        if self._loop is not None:
            self._rest = memoryview(bytes(self._rest) + self._outgoing.read())
            with suppress(OSError):  # the next read or `send` meets it, too
                self._flush()

    def _on_socket_writable(self) -> None:
        try:
            is_clear = self._flush()
        except OSError:
            is_clear = True  # `send` raises it again
        if is_clear and self._owes_room:
            self._owes_room = False
            self._on_room()

    def _read_on(self) -> None:
        if self._loop is not None:
            self._on_readable()
