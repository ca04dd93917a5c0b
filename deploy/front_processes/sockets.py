"""The sockets of a server with several fronts: the port that they share, and Unix sockets in a private folder."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

from ...runtime.processes.transport import SocketTransport
from ...stages.errors import ConfigError
from ..config import ServerConfig
from ..http.listening import ListeningSockets

BACKLOG = 128
UNIX = "unix:"  # before the path, in the address of an engine


def reserve_port(config: ServerConfig) -> list[socket.socket]:
    """Sockets that hold the port for processes of this user, and take no connections.

    `ConfigError` if another process listens there. With port 0, they have one that is free.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError("front_processes: this system has no SO_REUSEPORT, by which fronts share a port; set 1")
    probes = ListeningSockets.open(config)  # alone: a port that another server shares counts as taken
    port = probes.port
    held: list[socket.socket] = []
    try:
        for probe in probes.sockets:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.append(_bound(probe.family, probe.getsockname(), port))
    except OSError as error:
        for sock in held:
            sock.close()
        raise ConfigError(f"cannot share {config.host}:{port} among fronts: {error.strerror or error}") from None
    finally:
        probes.close()
    return held


def _bound(family: int, address: tuple[object, ...], port: int) -> socket.socket:
    """A socket that does not listen. Without SO_REUSEADDR no other server can take the port, even while no front lives;
    but closed connections of a server before this one prevent that for a minute."""
    try:
        return _bound_as(family, address, port, reuse=0)
    except OSError:
        return _bound_as(family, address, port, reuse=1)


def _bound_as(family: int, address: tuple[object, ...], port: int, reuse: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address[0], port, *address[2:]))
    except BaseException:
        sock.close()
        raise
    return sock


def front_path(folder: str | Path, number: int) -> Path:
    """The Unix socket of a front, for the others."""
    return Path(folder) / f"front-{number}.sock"


def engine_path(folder: str | Path, index: int) -> Path:
    """The Unix socket of an engine, for all fronts."""
    return Path(folder) / f"engine-{index}.sock"


def listen_at(path: Path) -> socket.socket:
    """A socket that listens at a path of the private folder, in place of what a dead process left there."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(str(path))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


class UnixListener:
    """Accepts connections at a path of the private folder, and calls `on_connect` with each."""

    def __init__(self, path: Path, on_connect: Callable[[SocketTransport], None]) -> None:
        self._path, self._on_connect = path, on_connect
        self._sock: socket.socket | None = None

    def start(self) -> None:
        """Begins to accept. OSError if the folder is gone."""
        self._sock = listen_at(self._path)
        asyncio.get_running_loop().add_reader(self._sock, self._accept)

    def close(self) -> None:
        """Stops accepting. Idempotent."""
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()
            self._sock = None
            self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        assert self._sock is not None
        try:
            sock, _ = self._sock.accept()
        except OSError:  # it has gone; or there are too many files, and the next turn tries again
            return
        self._on_connect(SocketTransport(sock))
