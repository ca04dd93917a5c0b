"""Checks WebSocket frames (RFC 6455) by their headers, before any payload is buffered.

aiohttp's parser bounds only the length of a message. `FrameGuard` also checks fragments, control frames and masks. It
reports a violation with its close code, so that the server can send an error before it closes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

MAX_FRAGMENTS = 1024  # of one message
MAX_CONTROL_FRAMES_PER_S = 100  # pings, pongs

PROTOCOL_ERROR, POLICY_VIOLATION, MESSAGE_TOO_BIG = 1002, 1008, 1009

_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
_OPCODES = frozenset({_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG})


def text_frame(message: bytes) -> bytes:
    """An unmasked text frame with a whole message, as servers send it."""
    length = len(message)
    if length < 126:
        return b"\x81%c%b" % (length, message)
    if length < 1 << 16:
        return b"\x81\x7e%b%b" % (struct.pack("!H", length), message)
    return b"\x81\x7f%b%b" % (struct.pack("!Q", length), message)


class FeedsFrames(Protocol):
    """The receiver of checked frames: aiohttp's parser."""

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Parses bytes."""

    def feed_eof(self) -> None:
        """Ends the input."""


class FrameGuard:
    """Checks each frame header and passes the bytes on to `reader`.

    `Connection.set_parser` sets `reader`. The first violation calls `on_breach(close_code, reason)`. After that, and
    after `close`, input is dropped.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float], on_breach: Callable[[int, str], object]) -> None:
        self.reader: FeedsFrames | None = None
        self._max_bytes = max_bytes
        self._clock = clock
        self._on_breach = on_breach
        self._is_closed = False
        self._head = b""  # bytes of an incomplete frame header
        self._num_left = 0  # payload bytes of the current frame that are still to come
        self._num_fragments = 0  # of the current message; 0 between messages
        self._num_bytes = 0  # of the current message
        self._num_control_frames = 0  # since `_counting_since`
        self._counting_since = 0.0

    def close(self) -> None:
        """Drops all further input."""
        self._is_closed = True

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Returns (is at end, bytes left over), as aiohttp's parsers do; in practice (False, b"")."""
        if not self._is_closed and (breach := self._scan(data)):
            self.close()
            self._on_breach(*breach)
        if self._is_closed or self.reader is None:
            return False, b""
        return self.reader.feed_data(data)

    def feed_eof(self) -> None:
        if self.reader is not None:
            self.reader.feed_eof()

    def _scan(self, data: bytes) -> tuple[int, str] | None:
        """Checks all complete frame headers in `data`; keeps an incomplete one for the next call.

        Returns the close code and reason of a violation, or None.
        """
        data = self._head + data
        position, end = self._num_left, len(data)
        while end - position >= 2:
            first, second = data[position], data[position + 1]
            length_at, length = position + 2, second & 0x7F
            mask_at, is_masked = length_at + {126: 2, 127: 8}.get(length, 0), bool(second & 0x80)
            payload_at = mask_at + 4 * is_masked
            if payload_at > end:
                break
            if length > 125:
                length = int.from_bytes(data[length_at:mask_at])
            if breach := self._judge(first, is_masked, length):
                return breach
            position = payload_at + length
        self._head, self._num_left = data[position:], max(0, position - end)
        return None

    def _judge(self, first: int, is_masked: bool, length: int) -> tuple[int, str] | None:
        opcode, is_last = first & 0x0F, bool(first & 0x80)
        if first & 0x70:
            return PROTOCOL_ERROR, "a frame has reserved bits set: no extension was negotiated, so send it uncompressed"
        if opcode not in _OPCODES:
            return PROTOCOL_ERROR, f"opcode = {opcode}: must be one that RFC 6455 defines"
        if not is_masked:
            return PROTOCOL_ERROR, "a frame is not masked: clients must mask every frame"
        if opcode >= _CLOSE:
            return self._judge_control(is_last, length)
        return self._judge_data(opcode, is_last, length)

    def _judge_control(self, is_last: bool, length: int) -> tuple[int, str] | None:
        if not is_last or length > 125:
            return PROTOCOL_ERROR, "a control frame must be one frame of at most 125 bytes"
        now = self._clock()
        if now - self._counting_since >= 1.0:
            self._counting_since, self._num_control_frames = now, 0
        self._num_control_frames += 1
        if self._num_control_frames > MAX_CONTROL_FRAMES_PER_S:
            return POLICY_VIOLATION, f"more than {MAX_CONTROL_FRAMES_PER_S} pings or pongs in a second"
        return None

    def _judge_data(self, opcode: int, is_last: bool, length: int) -> tuple[int, str] | None:
        if (opcode == _CONTINUATION) != (self._num_fragments > 0):
            return PROTOCOL_ERROR, "a data frame must continue the current message, and a continuation frame needs one"
        self._num_fragments += 1
        self._num_bytes += length
        if self._num_bytes > self._max_bytes:
            return MESSAGE_TOO_BIG, f"a message is longer than {self._max_bytes} bytes: send less"
        if self._num_fragments > MAX_FRAGMENTS:
            return MESSAGE_TOO_BIG, f"a message has more than {MAX_FRAGMENTS} fragments: send longer ones"
        if is_last:
            self._num_fragments = self._num_bytes = 0
        return None
