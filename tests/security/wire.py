"""Talk below HTTP: whatever bytes, and everything that comes back until the connection closes."""

from __future__ import annotations

import re
import socket
import time
from dataclasses import dataclass

from tests.deploy.running import Answer, RunningServer, read_answer, send


@dataclass(frozen=True)
class Told:
    """All that came back."""

    data: bytes
    is_closed: bool  # by the server, before our patience ended
    seconds: float

    @property
    def num_responses(self) -> int:
        return len(re.findall(rb"HTTP/1\.[01] \d{3} ", self.data))

    @property
    def status(self) -> int:
        return int(self.data.split(b" ", 2)[1])

    def answer(self) -> Answer:
        """The first response, parsed."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(self.data[: 1024 * 64])
            theirs.shutdown(socket.SHUT_WR)
            return read_answer(ours)


def tell(server: RunningServer, data: bytes, patience_s: float = 5.0) -> Told:
    """Sends `data` at once and reads to the end."""
    with server.connect(patience_s) as connection:
        began = time.monotonic()
        send(connection, data)
        return listen(connection, patience_s, began)


def listen(connection: socket.socket, patience_s: float = 5.0, began: float | None = None) -> Told:
    """Reads until the server closes, or for `patience_s`."""
    began = time.monotonic() if began is None else began
    connection.settimeout(patience_s)
    parts: list[bytes] = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except TimeoutError:
        return Told(b"".join(parts), False, time.monotonic() - began)
    except ConnectionResetError:
        pass
    return Told(b"".join(parts), True, time.monotonic() - began)
