"""A ring of pinned host buffers for copies to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....runtime.device_streams.interface import Event, Streams
from ...messages import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Pinned:
    """Pinned host memory, which the device reads and writes by itself."""

    numbers: Ints  # the memory, for the host
    array: Any  # the same memory, for copies on a stream


class SendRing:
    """Buffers to upload from.

    The host may write a buffer again when the copy that reads it is done.
    """

    def __init__(self, buffers: Sequence[Pinned], streams: Streams) -> None:
        self._buffers = buffers
        self._sent = [streams.event() for _ in buffers]
        self._next = 0

    def take(self) -> tuple[Pinned, Event]:
        """The next buffer, and the event to record after the copy that reads it.

        Waits for the last copy from this buffer only, which lies as many uploads back as there are buffers.
        """
        at, self._next = self._next, (self._next + 1) % len(self._buffers)
        self._sent[at].wait()
        return self._buffers[at], self._sent[at]
