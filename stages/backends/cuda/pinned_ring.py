"""Pinned memory of the host that a device copies from and to, a buffer a step, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....runtime.device_streams.interface import Event, Streams
from ...messages import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Pinned:
    """Memory of the host that a device reads and writes by itself."""

    numbers: Ints  # the memory, as the host sees it
    array: Any  # the same memory, as a stream copies it


class SendRing:
    """Buffers to send from. One is the host's again when the copy that reads it is done."""

    def __init__(self, buffers: Sequence[Pinned], streams: Streams) -> None:
        self._buffers = buffers
        self._sent = [streams.event() for _ in buffers]
        self._next = 0

    def take(self) -> tuple[Pinned, Event]:
        """The next buffer, and what to record behind the copy that reads it. Waits for the copy that read it last: for
        that event alone, which lies as many sends back as there are buffers."""
        at, self._next = self._next, (self._next + 1) % len(self._buffers)
        self._sent[at].wait()
        return self._buffers[at], self._sent[at]
