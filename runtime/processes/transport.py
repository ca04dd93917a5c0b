"""Transports: the non-blocking byte streams under a link. Sockets here; a simulated one is in `runtime/simulation`."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from collections.abc import Callable
from typing import Protocol

READ_BYTES = 1 << 18  # that `recv` returns at most
SOCKET_BYTES = 1 << 20  # buffer of a Unix socket requested in each direction; TCP sizes its own
LINGER_S = 1.0  # from `close` over TCP, for what was sent to arrive


class Transport(Protocol):
    """One end of a stream of bytes in both directions, used on one event loop."""

    failure: str | None  # the system's error that ended the stream; None also if the other end has gone

    def start(
        self, on_readable: Callable[[], None], on_writable: Callable[[], None], timeout_s: float | None = None
    ) -> None:
        """Begins to call `on_readable` while there is something to `recv`, and `on_writable` as `send` says.

        `timeout_s`: sent bytes may stay unacknowledged for so long; None: as the system has it.
        """

    def recv(self) -> bytes | None:
        """Up to READ_BYTES that have arrived; b"" at the end of the stream, None if there is nothing now.

        After a return of fewer than READ_BYTES, `on_readable` is called if there is more.
        """

    def send(self, data: memoryview) -> int:
        """Returns how many bytes were taken. If not all, `on_writable` is called once there is room.

        Raises OSError if the other end has gone.
        """

    def close(self) -> None:
        """Ends both directions; what `send` took still arrives if the other end reads. Idempotent."""


class SocketTransport:
    """A connected socket, of the family Unix or TCP. Owns it from the start."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_writable: Callable[[], None] | None = None
        self._awaits_room = False
        self._lingering: asyncio.TimerHandle | None = None
        self._is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
        self.failure: str | None = None
        sock.setblocking(False)
        if self._is_tcp:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        else:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)

    @property
    def sock(self) -> socket.socket:
        """The socket, for another transport over it in place of this one, which must not have started."""
        return self._sock

    def start(
        self, on_readable: Callable[[], None], on_writable: Callable[[], None], timeout_s: float | None = None
    ) -> None:
        if self._is_tcp and timeout_s is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * timeout_s))
        self._loop = asyncio.get_running_loop()
        self._on_writable = on_writable
        self._loop.add_reader(self._sock, on_readable)

    def recv(self) -> bytes | None:
        try:
            return self._sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            self._note(error)
            return b""

    def send(self, data: memoryview) -> int:
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._note(error)
            raise
        lacks_room = sent < len(data)
        if lacks_room is not self._awaits_room:
            self._await_room(lacks_room)
        return sent

    def close(self) -> None:
        loop = self._loop
        if loop is not None:
            loop.remove_reader(self._sock)
            if self._awaits_room:
                self._await_room(False)
            self._loop = None
            if self._is_tcp and _num_unacknowledged(self._sock):
                self._linger(loop)
        if self._lingering is None:
            self._sock.close()

    def _linger(self, loop: asyncio.AbstractEventLoop) -> None:
        """Reads until the other end has closed too: to close with unread bytes resets TCP, and drops what was sent."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            return
        self._lingering = loop.call_later(LINGER_S, self._end_lingering, loop)
        loop.add_reader(self._sock, self._discard, loop)

    def _discard(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.recv() == b"":
            self._end_lingering(loop)

    def _end_lingering(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._lingering is not None
        self._lingering.cancel()
        loop.remove_reader(self._sock)
        self._sock.close()

    def _note(self, error: OSError) -> None:
        if not isinstance(error, (ConnectionResetError, BrokenPipeError)):  # these: the other process has ended
            self.failure = error.strerror or str(error)

    def _await_room(self, awaits_room: bool) -> None:
        assert self._loop is not None and self._on_writable is not None
        self._awaits_room = awaits_room
        if awaits_room:
            self._loop.add_writer(self._sock, self._on_writable)
        else:
            self._loop.remove_writer(self._sock)


def _num_unacknowledged(sock: socket.socket) -> int:
    """Sent bytes that the other end's system does not have yet; 1 if this system cannot say."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])
    except OSError:
        return 1
