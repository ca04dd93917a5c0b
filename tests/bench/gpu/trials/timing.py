"""How long a launch takes: on the device between two events, or, in a dry run, on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

from tests.bench.gpu.trials.trial import Tensors

FLUSHED_BYTES = 256 << 20  # several times what an L2 cache holds
NUM_TIMED = 15


class Clock(Protocol):
    """Tells times."""

    def us(self, launch: Callable[[], Tensors]) -> float:
        """Microseconds of one launch, a median. Launches it several times."""


class DeviceClock:
    """Launches are captured, as in a step, so the host's part is not in their times; the cache is cold, and clean: what
    was written before would be written back meanwhile. What two events take besides is in them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flushed = torch.zeros(FLUSHED_BYTES // 8, dtype=torch.int64, device=device)

    def us(self, launch: Callable[[], Tensors]) -> float:
        launch()  # compiles
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = launch()
        pairs = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(NUM_TIMED + 1)
        ]
        for began, done in pairs:
            self._flushed.max()
            began.record()
            graph.replay()
            done.record()
        torch.cuda.synchronize(self.device)
        del kept
        return statistics.median(1000.0 * began.elapsed_time(done) for began, done in pairs[1:])


class HostClock:
    """One launch, on the host."""

    def us(self, launch: Callable[[], Tensors]) -> float:
        began = time.perf_counter()
        launch()
        return 1e6 * (time.perf_counter() - began)


def clock_of(device: torch.device) -> Clock:
    """The device's, or without one the host's."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
