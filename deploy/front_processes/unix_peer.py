"""An engine of this machine, as its fronts reach it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from ...runtime.processes.transport import SocketTransport
from ...stages.machines.engine_peers import name_of


class UnixPeer:
    """An engine of this machine at a Unix socket; see `EnginePeer` of `stages/machines`."""

    def __init__(self, path: str, index: int, on_stuck: Callable[[int], object]) -> None:
        self.name = name_of((path, index))
        self._path, self._index, self._on_stuck = path, index, on_stuck

    async def connect(self) -> SocketTransport:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, self._path)
        except BaseException:
            sock.close()
            raise
        return SocketTransport(sock)

    def note_stuck(self) -> None:
        self._on_stuck(self._index)
