"""The sockets that a server listens on: opened first, before anything large is imported or loaded.

An address in use is refused with the name of the process that has it. What a dead server left is taken over. Imports
no aiohttp.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...runtime.env.log import get_logger
from ...stages.errors import ConfigError
from ..config import ServerConfig
from .port_holder import port_problem, process_name

BACKLOG = 1024
PROBE_S = 1.0  # for a Unix socket to accept
LOCK_S = 2.0  # for another server that opens a socket in the same folder

log = get_logger("millrace.deploy")


class ListeningSockets:
    """Sockets that listen already; their connections wait until they are accepted.

    `close` frees the address, and removes the file of a Unix socket unless another server has replaced it.
    """

    def __init__(self, sockets: list[socket.socket], path: Path | None = None) -> None:
        self.sockets = sockets
        name = sockets[0].getsockname()
        self.port = int(name[1]) if isinstance(name, tuple) else 0  # with port 0, the one that the system chose
        self._path = path
        self._file = None if path is None else _identity(path)

    @classmethod
    def open(
        cls, config: ServerConfig, *, shares_port: bool = False, flags: tuple[str, str] = ("--host", "--port")
    ) -> ListeningSockets:
        """Opens the sockets of the configuration. `ConfigError` says why that is impossible.

        With `shares_port` other processes of this user may do the same: each connection goes to one of them. `flags`
        are those that set host and port.
        """
        if config.uds is not None:
            path = Path(config.uds)
            return cls([_listen_unix(path)], path)
        return cls(_listen_tcp(config.host, config.port, shares_port, flags))

    def close(self) -> None:
        """Stops listening. Idempotent."""
        if self._path is not None and self._file is not None and _identity(self._path) == self._file:
            self._path.unlink(missing_ok=True)
        self._file = None
        for sock in self.sockets:
            sock.close()


# -- TCP


def _listen_tcp(host: str, port: int, shares_port: bool, flags: tuple[str, str]) -> list[socket.socket]:
    """A socket for each address of the host, all on the same port."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"host = {host}: {reason}; must be a name or an address of this machine") from None
    sockets: list[socket.socket] = []
    problem: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        chosen = (address[0], sockets[0].getsockname()[1] if sockets and not port else port, *address[2:])
        try:
            sockets.append(_listen_at(family, kind, protocol, chosen, shares_port))
        except OSError as error:
            problem = error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # IPv6 may be off
                break
    if sockets and (problem is None or problem.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)):
        return sockets
    for sock in sockets:
        sock.close()
    assert problem is not None
    raise ConfigError(port_problem(host, port, problem, *flags)) from None


def _listen_at(family: int, kind: int, protocol: int, address: Any, shares_port: bool) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else a port stays taken for a minute after an end
        if shares_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


# -- Unix


def _listen_unix(path: Path) -> socket.socket:
    try:
        with _locked(path.parent):
            _remove_stale(path)
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.bind(str(path))
                sock.listen(BACKLOG)
            except BaseException:
                sock.close()
                raise
            return sock
    except OSError as error:
        raise ConfigError(
            f"uds = {path}: {error.strerror or error}; must be a path in a folder that exists, of at most 107 bytes"
        ) from None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds off other servers that open a socket in this folder. Leaves no file behind."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline_s = time.monotonic() + LOCK_S
        while time.monotonic() < deadline_s:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # this file system has no locks
                break
        yield
    finally:
        os.close(descriptor)


def _remove_stale(path: Path) -> None:
    """Removes a socket on which no process listens. `ConfigError` if one does, or if it is another kind of file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"uds = {path}: is a file of another kind, which stays; name a path that does not exist")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            log.info("socket.taken_over", path=str(path))
            path.unlink()
            return
        except (TimeoutError, BlockingIOError):  # its queue of connections is full
            holder = "another process"
        else:
            (pid, _, _) = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            holder = process_name(pid)
    raise ConfigError(f"uds = {path}: {holder} listens there; stop it, or name another path")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
