"""Links over TCP: dialing and listening, with proof of the fleet's key before the first frame.

With TLS the proof is within it: certificates are shown first, and the key is proven to an end that has a valid one.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from ..env.awake_time import AwakeTimeout
from ..env.log import get_logger
from .auth import MAC_BYTES, AuthError, FleetKey, Handshake, KeyRefused, Role
from .frames import ALERT_RECORD, FIRST_BYTES, HANDSHAKE_RECORD, what_speaks
from .handshake_turns import HandshakeTurns, source_of
from .tls import FleetTls, TlsError
from .tls_transport import TlsStream
from .transport import SocketTransport

HANDSHAKE_S = 5.0  # for the whole proof, and TLS before it
MAX_PENDING = 32  # connections that have not proven the key; one more ends an older one
LOG_PAUSE_S = 10.0  # between two log lines about refused connections of one address
MAX_ADDRESSES = 256  # of refused connections, remembered for the log
ACCEPT_PAUSE_S = 1.0  # after an error, such as too many open files

log = get_logger("millrace.runtime")


async def dial(
    host: str,
    port: int,
    key: FleetKey | None,
    timeout_s: float = HANDSHAKE_S,
    *,
    tls: FleetTls | None = None,
    server_name: str | None = None,
) -> SocketTransport:
    """Connects to a `TcpListener` that has the same key. With `tls`, its certificate must be for `server_name`.

    The addresses of a name are tried in turn until one end is met, each for its share of the time that is left. Raises
    `AuthError` if the other end does not have the key, `TlsError` if one end refuses the certificate of the other, and
    OSError; TimeoutError after `timeout_s` for connection and proof together, and before that `timeout_s` for the name:
    twice `timeout_s` at most, without standstills. An error of several addresses names each, and is a refusal if one of
    them is: the others may only be away. `server_name`: None is `host`.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    async with AwakeTimeout(timeout_s):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failed: list[tuple[str, AuthError | OSError]] = []
    for place, (family, kind, protocol, _, address) in enumerate(found):
        left_s = (end_s - loop.time()) / (len(found) - place)
        try:
            async with AwakeTimeout(max(left_s, timeout_s / len(found))):
                sock = socket.socket(family, kind, protocol)
                return await _connect(sock, address, key, tls, server_name or host)
        except (AuthError, OSError) as error:  # also a timeout
            failed.append((str(address[0]), error))
    raise _joined(failed) if failed else OSError(f"{host} has no address")


def _joined(failed: Sequence[tuple[str, AuthError | OSError]]) -> AuthError | OSError:
    """The error of one address, or one that names all."""
    refusals = [error for _, error in failed if isinstance(error, AuthError)]
    error = refusals[0] if refusals else failed[-1][1]
    if len(failed) == 1:
        return error
    text = "; ".join(f"{address}: {_reason(one)}" for address, one in failed)
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, text)
    return type(error)(text)


def _reason(error: AuthError | OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)


async def _connect(
    sock: socket.socket, address: Any, key: FleetKey | None, tls: FleetTls | None, server_name: str
) -> SocketTransport:
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
        return await _met(sock, key, tls, "dialer", server_name)
    except BaseException:
        sock.close()
        raise


async def _met(
    sock: socket.socket, key: FleetKey | None, tls: FleetTls | None, role: Role, server_name: str | None = None
) -> SocketTransport:
    """The transport of a connection whose other end has shown a certificate and the key, as far as there are any."""
    stream: _Stream = _PlainStream(sock)
    if tls is not None:
        stream = TlsStream(sock, tls, server_name)
        await stream.shake_hands()
    if key is not None:
        await _prove(stream, key, role)
    return stream.transport()


class _Stream(Protocol):
    """A connection before its link."""

    async def recv(self, num_bytes: int) -> bytes:
        """Up to so many bytes, as soon as there are some; b"" at the end."""

    async def sendall(self, data: bytes) -> None:
        """Sends it all."""

    def transport(self) -> SocketTransport:
        """The connection for a link."""


class _PlainStream:
    """A socket as it is; see `_Stream`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    async def recv(self, num_bytes: int) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._sock, num_bytes)

    async def sendall(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    def transport(self) -> SocketTransport:
        return SocketTransport(self._sock)


class TcpListener:
    """Accepts connections, and calls `on_connect` with each whose other end has the key, and a certificate with `tls`.

    Until then a connection has `handshake_s`, is one of `MAX_PENDING`, and takes part in `HandshakeTurns`, with TLS and
    without. Beyond loopback a key is needed. `address` is set by `start`; port 0 takes a free one.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: FleetKey | None,
        on_connect: Callable[[SocketTransport], None],
        handshake_s: float = HANDSHAKE_S,
        tls: FleetTls | None = None,
    ) -> None:
        if key is None and not _is_loopback(host):
            raise ValueError(f"listening on {host}, beyond this machine, needs a fleet key")
        self._host, self._port = host, port
        self._key = key
        self._on_connect = on_connect
        self._handshake_s = handshake_s
        self._tls = tls
        self._sock: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._pending: dict[asyncio.Task[None], str] = {}  # to the peer's source, in order of arrival
        self._tasks: set[asyncio.Task[None]] = set()  # of `_pending`, and those that were ended and still run
        self._refusals = RefusalLog()
        self._turns: HandshakeTurns | None = None  # while it listens
        self.address: tuple[str, int] = (host, port)
        self.num_refused = 0

    async def start(self) -> None:
        """Listens. Raises OSError if the address cannot be used."""
        if self._sock is not None:
            raise RuntimeError(f"it listens on {self.address[0]} already")
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = self._sock = socket.create_server((self._host, self._port), family=family, backlog=MAX_PENDING)
        sock.setblocking(False)
        self.address = sock.getsockname()[:2]
        turns = self._turns = HandshakeTurns()
        self._accepting = asyncio.get_running_loop().create_task(self._accept(sock, turns), name="link listener")

    async def aclose(self) -> None:
        """Stops listening, and drops the connections that have not proven the key. Idempotent."""
        tasks = [*self._tasks, *([] if self._accepting is None else [self._accepting])]
        self._accepting = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._turns is not None:
            self._turns.close()
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    async def _accept(self, listening: socket.socket, turns: HandshakeTurns) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await turns.may_accept()
            try:
                sock, address = await loop.sock_accept(listening)
            except OSError as error:
                log.warning("link.accept_failed", reason=error.strerror or str(error))
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._pending) >= MAX_PENDING:
                self._end_one()
            peer = str(address[0])
            task = loop.create_task(turns.run(peer, partial(self._take, sock, peer, turns)), name="link handshake")
            self._pending[task] = source_of(peer)
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, sock))
            await asyncio.sleep(0)  # NOTE: `sock_accept` does not yield while connections wait

    def _end_one(self) -> None:
        """Ends the oldest connection of a source with the most: a peer with the key needs no time."""
        counts = Counter(self._pending.values())
        most = max(counts.values())
        task, peer = next((task, peer) for task, peer in self._pending.items() if counts[peer] == most)
        del self._pending[task]
        task.cancel()  # it closes the socket in the next turn, after the loop has forgotten it
        self._refuse(peer, f"{MAX_PENDING} newer connections had not proven the key either")

    def _ended(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._pending.pop(task, None)
        self._tasks.discard(task)
        if task.cancelled():
            sock.close()  # it may not have begun

    def _refuse(self, peer: str, reason: str) -> None:
        self.num_refused += 1
        self._refusals.note(peer, reason, asyncio.get_running_loop().time())

    async def _take(self, sock: socket.socket, peer: str, turns: HandshakeTurns) -> None:
        try:
            async with AwakeTimeout(self._handshake_s):
                await turns.turn(peer)
                transport = await _met(sock, self._key, self._tls, "listener")
        except (AuthError, OSError) as error:  # also a timeout
            sock.close()
            is_late = isinstance(error, TimeoutError)
            return self._refuse(peer, f"no proof within {self._handshake_s:g} s" if is_late else str(error))
        except BaseException:
            sock.close()
            raise
        try:
            self._on_connect(transport)
        except Exception as error:
            transport.close()
            log.error("link.connect_failed", peer=peer, error=type(error).__name__, exc_info=error)


class RefusalLog:
    """Logs refused connections: of an address one line each `LOG_PAUSE_S`, with their number since its last line."""

    def __init__(self) -> None:
        self._addresses: dict[str, tuple[float, int]] = {}  # when it was logged, and how many were refused since

    def note(self, peer: str, reason: str, now_s: float) -> None:
        logged_s, count = self._addresses.pop(peer, (-math.inf, 0))
        count += 1
        if now_s - logged_s >= LOG_PAUSE_S:
            log.warning("link.refused_peer", peer=peer, reason=reason, count=count)
            logged_s, count = now_s, 0
        self._addresses[peer] = (logged_s, count)
        if len(self._addresses) > MAX_ADDRESSES:
            del self._addresses[next(iter(self._addresses))]


async def _prove(stream: _Stream, key: FleetKey, role: Role) -> None:
    """Runs one end's part of the handshake. Raises `AuthError`, and OSError."""
    handshake = Handshake(key.derive("link"), role)
    first = b""  # bytes of the other end
    try:
        await stream.sendall(handshake.nonce)
        while not handshake.is_done:
            data = await stream.recv(handshake.num_wanted)
            if not data:
                raise _closed(handshake, role)
            if len(first) < FIRST_BYTES:
                first += data[:FIRST_BYTES]
            if answer := handshake.feed(data):
                await stream.sendall(answer)
    except (AuthError, ConnectionError):
        if (what := what_speaks(first, has_key=True)) is not None:  # by chance, so begins one nonce in 30,000
            raise (TlsError if first[:2] in (HANDSHAKE_RECORD, ALERT_RECORD) else AuthError)(what) from None
        raise


def _closed(handshake: Handshake, role: Role) -> AuthError | OSError:
    """The error of a connection that ended before its proof.

    A listener ends it without a word if the dialer's proof is wrong; and whatever that is, if it stops, or drops one of
    too many connections.
    """
    if role == "listener":
        return AuthError("the other end closed the connection before it proved the key")
    if handshake.num_wanted > MAC_BYTES:
        return ConnectionAbortedError("it closed the connection at once; it stops, is no engine, or is in a flood")
    return KeyRefused("it closed the connection at the proof of the key, so it has another one")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
