"""Links over TCP: dialing and listening, with proof of the fleet's key before the first frame."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable

from ..env.log import get_logger
from .auth import AuthError, FleetKey, Handshake, Role
from .transport import SocketTransport

HANDSHAKE_S = 5.0  # for the whole proof
MAX_PENDING = 32  # connections that have not proven the key; one more ends the oldest
USER_TIMEOUT_S = 10.0  # that sent bytes may stay unacknowledged
ACCEPT_PAUSE_S = 1.0  # after an error, such as too many open files

log = get_logger("millrace.runtime")


async def dial(host: str, port: int, key: FleetKey | None, timeout_s: float = HANDSHAKE_S) -> SocketTransport:
    """Connects to a `TcpListener` that has the same key.

    Raises `AuthError` if the other end does not have it, OSError, and TimeoutError after `timeout_s` for connection
    and proof together.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        error: OSError | None = None
        for family, kind, protocol, _, address in found:
            sock = socket.socket(family, kind, protocol)
            try:
                sock.setblocking(False)
                await loop.sock_connect(sock, address)
                if key is not None:
                    await _prove(sock, key, "dialer")
                return SocketTransport(sock, USER_TIMEOUT_S)
            except OSError as failed:
                sock.close()
                error = failed
            except BaseException:
                sock.close()
                raise
    raise error or OSError(f"{host} has no address")


class TcpListener:
    """Accepts connections, and calls `on_connect` with each whose other end has the key.

    Beyond loopback a key is needed. `address` is set by `start`; port 0 takes a free one.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: FleetKey | None,
        on_connect: Callable[[SocketTransport], None],
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        if key is None and not _is_loopback(host):
            raise ValueError(f"listening on {host}, beyond this machine, needs a fleet key")
        self._host, self._port = host, port
        self._key = key
        self._on_connect = on_connect
        self._handshake_s = handshake_s
        self._sock: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._pending: dict[asyncio.Task[None], socket.socket] = {}  # in order of arrival
        self.address: tuple[str, int] = (host, port)
        self.num_refused = 0

    async def start(self) -> None:
        """Listens. Raises OSError if the address cannot be used."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = self._sock = socket.create_server((self._host, self._port), family=family, backlog=MAX_PENDING)
        sock.setblocking(False)
        self.address = sock.getsockname()[:2]
        self._accepting = asyncio.get_running_loop().create_task(self._accept(sock), name="link listener")

    async def aclose(self) -> None:
        """Stops listening, and drops the connections that have not proven the key. Idempotent."""
        tasks = [*self._pending, *([] if self._accepting is None else [self._accepting])]
        self._accepting = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listening)
            except OSError as error:
                log.warning("link.accept_failed", reason=error.strerror or str(error))
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._pending) >= MAX_PENDING:
                next(iter(self._pending)).cancel()  # the oldest: a peer with the key needs no time
                self.num_refused += 1
            task = loop.create_task(self._take(sock, str(address[0])), name="link handshake")
            self._pending[task] = sock
            task.add_done_callback(self._end_pending)

    def _end_pending(self, task: asyncio.Task[None]) -> None:
        sock = self._pending.pop(task)
        if task.cancelled():
            sock.close()

    async def _take(self, sock: socket.socket, peer: str) -> None:
        try:
            async with asyncio.timeout(self._handshake_s):
                if self._key is not None:
                    await _prove(sock, self._key, "listener")
        except (AuthError, OSError, TimeoutError) as error:
            self.num_refused += 1
            sock.close()
            reason = f"no proof within {self._handshake_s:g} s" if isinstance(error, TimeoutError) else str(error)
            log.warning("link.refused_peer", peer=peer, reason=reason)
        else:
            self._on_connect(SocketTransport(sock, USER_TIMEOUT_S))


async def _prove(sock: socket.socket, key: FleetKey, role: Role) -> None:
    """Runs one end's part of the handshake. Raises `AuthError`, and OSError."""
    loop = asyncio.get_running_loop()
    handshake = Handshake(key.derive("link"), role)
    await loop.sock_sendall(sock, handshake.nonce)
    while not handshake.is_done:
        data = await loop.sock_recv(sock, handshake.num_wanted)
        if not data:
            raise AuthError("the other end closed the connection before it proved the key")
        if answer := handshake.feed(data):
            await loop.sock_sendall(sock, answer)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
