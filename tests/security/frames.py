"""WebSocket below any library: frames of whatever bits, and all frames that come back."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.running import RunningServer, head_bytes, send

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}


def frame(
    opcode: int,
    payload: bytes = b"",
    *,
    is_last: bool = True,
    rsv: int = 0,
    is_masked: bool = True,
    length: int | None = None,
) -> bytes:
    """A frame; `length` is what it says of itself, be it true or not."""
    length = len(payload) if length is None else length
    first = (0x80 if is_last else 0) | rsv << 4 | opcode
    mask_bit = 0x80 if is_masked else 0
    if length < 126:
        head = struct.pack("!BB", first, mask_bit | length)
    elif length < 65536:
        head = struct.pack("!BBH", first, mask_bit | 126, length)
    else:
        head = struct.pack("!BBQ", first, mask_bit | 127, length)
    return head + (bytes(4) if is_masked else b"") + payload  # a mask of zeros leaves the payload as it is


def say(message: Mapping[str, Any]) -> bytes:
    """A message in one frame."""
    return frame(TEXT, json.dumps(message).encode())


@dataclass
class Told:
    """What the server sent."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    pongs: int = 0
    close_code: int | None = None
    is_cut: bool = False  # the connection is closed

    @property
    def error(self) -> dict[str, Any]:
        """The last message, which must be an error of the shape that `check_error` wants."""
        last = self.messages[-1]
        assert last["type"] == "error" and set(last["error"]) - {"details"} == {"message", "type", "param", "code"}, (
            last
        )
        assert 0 < len(last["error"]["message"]) <= 512
        error: dict[str, Any] = last["error"]
        return error


@contextmanager
def upgraded(server: RunningServer, headers: Mapping[str, str] | None = None, **options: Any) -> Iterator[Raw]:
    """A socket on `/v1/stream`, behind the handshake."""
    with socket.socket() as connection:
        if "receive_buffer" in options:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options["receive_buffer"])
        connection.settimeout(60)
        connection.connect(server.address)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(head_bytes("GET", "/v1/stream", UPGRADE | dict(headers or {})))
        data = b""
        while b"\r\n\r\n" not in data:
            data += connection.recv(4096)
        head, _, rest = data.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 "), head
        yield Raw(connection, rest)


class Raw:
    """One such socket."""

    def __init__(self, connection: socket.socket, data: bytes) -> None:
        self.connection = connection
        self.told = Told()
        self._data = data

    def send(self, data: bytes) -> None:
        send(self.connection, data)

    def listen(self, patience_s: float = 60.0) -> Told:
        """Reads up to the close, or for so long."""
        deadline = time.monotonic() + patience_s
        while self.told.close_code is None and not self.told.is_cut:
            self._take_frames()
            self.connection.settimeout(max(0.001, deadline - time.monotonic()))
            if self.told.close_code is not None:
                break
            try:
                data = self.connection.recv(65536)
            except TimeoutError:
                break
            except ConnectionError:
                data = b""
            self.told.is_cut = not data
            self._data += data
        self._take_frames()
        return self.told

    def _take_frames(self) -> None:
        while len(self._data) >= 2:
            first, length = self._data[0], self._data[1]
            assert first & 0x70 == 0 and length < 128, "a server's frame is neither compressed nor masked"
            start = 2 + {126: 2, 127: 8}.get(length, 0)
            if length > 125:
                length = int.from_bytes(self._data[2:start])
            if len(self._data) < start + length:
                return
            payload, self._data = self._data[start : start + length], self._data[start + length :]
            self._take(first & 0x0F, payload)

    def _take(self, opcode: int, payload: bytes) -> None:
        assert self.told.close_code is None, "nothing comes behind a close"
        if opcode == TEXT:
            self.told.messages.append(json.loads(payload))
        elif opcode == PONG:
            self.told.pongs += 1
        elif opcode == CLOSE:
            self.told.close_code = int.from_bytes(payload[:2]) if payload else 1005
        else:
            assert opcode == PING, opcode


def memory_mib(server: RunningServer) -> float:
    """Resident, of the server's process."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
