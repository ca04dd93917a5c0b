"""CUDA streams, events and graphs through torch.cuda.

`runtime/device_streams/interface.py` specifies each call. Tests of the callers use
`runtime/device_streams/simulated.py` instead.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....runtime.device_streams.interface import Event, Graph


class CudaStreams:
    """The streams of one GPU. All graphs share one memory pool, as no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()

    def stream(self, name: str) -> CudaStream:
        return CudaStream(name, self)

    def event(self) -> CudaEvent:
        return CudaEvent()

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)


class CudaEvent:
    """A timed event.

    A waiting thread sleeps: a spinning one would take the core from the device thread.
    """

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)

    def query(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def us_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CudaEvent)
        return 1000.0 * float(earlier.event.elapsed_time(self.event))


class CudaGraph:
    """A `torch.cuda.CUDAGraph`."""

    def __init__(self, graph: torch.cuda.CUDAGraph, num_bytes: int) -> None:
        self.graph = graph
        self.num_bytes = num_bytes


class CudaStream:
    """A `torch.cuda.Stream`. Work launched on it must not wait for the device."""

    def __init__(self, name: str, streams: CudaStreams) -> None:
        self.name = name
        self._streams = streams
        self._stream = torch.cuda.Stream(streams.device)

    def use(self) -> None:
        torch.cuda.set_stream(self._stream)

    def launch(self, run: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            run()

    def copy(self, destination: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)

    def record(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        event.event.record(self._stream)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.event)

    def capture(self, run: Callable[[], object]) -> CudaGraph:
        graph, device = torch.cuda.CUDAGraph(), self._streams.device
        torch.cuda.empty_cache()  # the capture does so too; done before, it does not change `num_bytes`
        before = torch.cuda.memory_reserved(device)
        with torch.cuda.graph(graph, pool=self._streams.pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return CudaGraph(graph, torch.cuda.memory_reserved(device) - before)

    def replay(self, graph: Graph) -> None:
        assert isinstance(graph, CudaGraph)
        with torch.cuda.stream(self._stream):
            graph.graph.replay()
