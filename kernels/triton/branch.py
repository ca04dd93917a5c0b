"""A branch of a CUDA graph: launches that run beside those behind them, until a later launch needs them.

Only while a graph is captured, and if `SWITCHES` allows it: an event of the capturing stream begins the branch on a
stream of its own, and another ends it. Outside a capture launches stay in order, as two events more would cost the host
as much as the branch saves.

Memory that the branch writes must be allocated before it begins, on the capturing stream, and be in use until a launch
behind the join: the allocator knows of the capturing stream alone. The launch behind the join depends on both streams;
if it is an early launch (`launch.py`), it waits for both.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from .switches import SWITCHES


class Branch:
    """Launches beside those of the stream that began it.

    `join` them before the first launch that reads their result, and before the end of the capture.
    """

    def __init__(self, device: torch.device, launch: Callable[[], object]) -> None:
        """Calls `launch`, whose launches run after all that is on the current stream now."""
        self._ended: torch.cuda.Event | None = None
        if not (SWITCHES.branches and is_captured(device)):
            launch()
            return
        stream = _stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            launch()
            self._ended = stream.record_event()
        self._device = device

    def join(self) -> None:
        """Makes later launches on the current stream wait for the branch. Calls after the first do nothing."""
        if self._ended is not None:
            torch.cuda.current_stream(self._device).wait_event(self._ended)
            self._ended = None


def is_captured(device: torch.device) -> bool:
    """Whether the current stream of the device captures a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all branches of a device. In use by one capture at a time."""
    return torch.cuda.Stream(device)
