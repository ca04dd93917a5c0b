"""Frames: how messages lie in a stream of bytes, in both directions. No socket and no event loop.

A frame is 16 bytes (magic, kind, edge, lengths of its two parts, a count), then a header and a body. `wire.py` defines
what these contain.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from .wire import ALIGNMENT, Buffer, WireError

MAX_FRAME_BYTES = 64 << 20  # a prompt of a million tokens has 4 MiB
MAX_HELLO_BYTES = 1 << 18  # of the first frame, before the other end is known

FRAME = struct.Struct("<HBBIII")  # magic, kind, edge, bytes of the header, bytes of the body, count of credits
MAGIC = 0x4C4D
HELLO, WORD, ITEM, CREDIT, CLOSE, PING, PONG = range(1, 8)  # kinds

HELLO_START = struct.pack("<HBB", MAGIC, HELLO, 0)

Frame = tuple[int, int, memoryview, memoryview, int]  # kind, edge, header, body, count


# what a connection begins with that is none of a link: TLS that asks for a handshake or refuses one, and another server
HANDSHAKE_RECORD, ALERT_RECORD, HTTP = b"\x16\x03", b"\x15\x03", b"HTTP"
FIRST_BYTES = 4  # by which they are known


class LinkError(Exception):
    """The other end sent an invalid frame, has another version, or is silent. The message says which."""


class NoLink(LinkError):
    """The other end does not begin as a link does: it has other settings, or is another server. The message says it."""


def what_speaks(first: bytes, *, has_key: bool) -> str | None:
    """What an end must be that begins a connection with these bytes and not as expected, and what to change.

    None: they do not say it. `has_key`: this end has proof of a key to come, and no link yet.
    """
    if first[:2] in (HANDSHAKE_RECORD, ALERT_RECORD):
        return "it speaks TLS and this end does not; start both with the files of TLS, or none"
    if first.startswith(HTTP):
        return "it speaks HTTP, so this port is not the one for fronts; name the port of its links"
    if has_key and first.startswith(HELLO_START):
        return "it has no key and this end has one; give both the same file of a key, or none"
    return None


class FrameReader:
    """Bytes in, frames out. Holds at most one incomplete frame, besides the bytes of the last `feed`.

    `max_frame_bytes` limits header and body together, and may be changed between two frames.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._received: bytes | bytearray = b""  # bytearray: a frame that comes in pieces
        self._at = 0  # of the next frame

    def __len__(self) -> int:
        """Bytes that belong to no frame yet."""
        return len(self._received) - self._at

    @property
    def first(self) -> bytes:
        """The first bytes that belong to no frame yet."""
        return bytes(self._received[self._at : self._at + FIRST_BYTES])

    def feed(self, data: bytes) -> None:
        """Adds what has arrived. Take all its frames before the next call."""
        if self._at == len(self._received):
            self._received = data
        elif isinstance(self._received, bytearray) and not self._at:
            self._received += data
        else:
            self._received = bytearray(memoryview(self._received)[self._at :])
            self._received += data
        self._at = 0

    def next(self) -> Frame | None:
        """The next complete frame; None if more bytes are needed. Raises `LinkError` at an invalid one."""
        at, received = self._at, self._received
        begin = at + FRAME.size
        if len(received) < begin:
            self._keep_rest()
            return None
        magic, kind, edge, header_bytes, body_bytes, count = FRAME.unpack_from(received, at)
        if magic != MAGIC:
            raise LinkError(f"a frame begins with {magic:#06x}: must be {MAGIC:#06x}")
        if header_bytes + body_bytes > self.max_frame_bytes:
            raise LinkError(f"a frame of {header_bytes + body_bytes} bytes: at most {self.max_frame_bytes}")
        end = begin + header_bytes + body_bytes
        if len(received) < end:
            self._keep_rest()
            return None
        frame = received[begin:end] if isinstance(received, bytes) else bytes(memoryview(received)[begin:end])
        content = memoryview(frame)  # of a copy: messages keep views of it
        if end == len(received):  # NOTE: frees what was read before the next read, which can then use its memory
            self._received, self._at = b"", 0
        else:
            self._at = end
        return kind, edge, content[:header_bytes], content[header_bytes:], count

    def _keep_rest(self) -> None:
        """Frees the frames before the incomplete one: a large one would stay until more arrives."""
        if self._at:
            self._received, self._at = bytearray(memoryview(self._received)[self._at :]), 0


def pack_frame(
    kind: int,
    edge: int = 0,
    header: bytes = b"",
    body: Sequence[Buffer] = (),
    count: int = 0,
    max_frame_bytes: int = MAX_FRAME_BYTES,
) -> list[Buffer]:
    """The bytes of a frame, in pieces; the header is padded. Raises `WireError` if it is too large."""
    size = sum(map(len, body))
    if len(header) + size > max_frame_bytes:
        raise WireError(f"a message of {len(header) + size} bytes cannot be sent: at most {max_frame_bytes}")
    padding = -len(header) % ALIGNMENT
    start = FRAME.pack(MAGIC, kind, edge, len(header) + padding, size, count)
    return [start, header, b" " * padding, *body]
