"""Transports: the non-blocking byte streams under a link. Sockets here; a simulated one is in `runtime/simulation`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Protocol

READ_BYTES = 1 << 18  # that `recv` returns at most
SOCKET_BYTES = 1 << 20  # buffer of a Unix socket requested in each direction; TCP sizes its own


class Transport(Protocol):
    """One end of a stream of bytes in both directions, used on one event loop."""

    def start(self, on_readable: Callable[[], None], on_writable: Callable[[], None]) -> None:
        """Begins to call `on_readable` while there is something to `recv`, and `on_writable` as `send` says."""

    def recv(self) -> bytes | None:
        """Up to READ_BYTES that have arrived; b"" at the end of the stream, None if there is nothing now.

        After a return of fewer than READ_BYTES, `on_readable` is called if there is more.
        """

    def send(self, data: memoryview) -> int:
        """Returns how many bytes were taken. If not all, `on_writable` is called once there is room.

        Raises OSError if the other end has gone.
        """

    def close(self) -> None:
        """Ends both directions. Idempotent."""


class SocketTransport:
    """A connected socket, of the family Unix or TCP. Owns it from the start.

    `user_timeout_s` (TCP): how long sent bytes may stay unacknowledged before the system ends the connection.
    """

    def __init__(self, sock: socket.socket, user_timeout_s: float | None = None) -> None:
        self._sock = sock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_writable: Callable[[], None] | None = None
        self._awaits_room = False
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if user_timeout_s is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * user_timeout_s))
        else:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)

    def start(self, on_readable: Callable[[], None], on_writable: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_writable = on_writable
        self._loop.add_reader(self._sock, on_readable)

    def recv(self) -> bytes | None:
        try:
            return self._sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return b""

    def send(self, data: memoryview) -> int:
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        lacks_room = sent < len(data)
        if lacks_room is not self._awaits_room:
            self._await_room(lacks_room)
        return sent

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._sock)
            if self._awaits_room:
                self._await_room(False)
            self._loop = None
        self._sock.close()

    def _await_room(self, awaits_room: bool) -> None:
        assert self._loop is not None and self._on_writable is not None
        self._awaits_room = awaits_room
        if awaits_room:
            self._loop.add_writer(self._sock, self._on_writable)
        else:
            self._loop.remove_writer(self._sock)
