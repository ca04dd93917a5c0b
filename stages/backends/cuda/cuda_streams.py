"""CUDA streams, events and graphs through torch.cuda.

`runtime/device_streams/interface.py` specifies each call. Tests of the callers use
`runtime/device_streams/simulated.py` instead.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....runtime.device_streams.interface import DeviceEvent, DeviceGraph
from .cuda_probe import CudaProbe


class CudaStreams:
    """The streams of one GPU. All graphs share one memory pool, as no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self._streams: list[torch.cuda.Stream] = []  # the first one computes the steps
        self._probe: CudaProbe | None = None

    def stream(self, name: str) -> CudaStream:
        stream = CudaStream(name, self)
        self._streams.append(stream.cuda_stream)
        if self._probe is None:
            self._probe = CudaProbe(self.device, self._streams)
        return stream

    def event(self) -> CudaEvent:
        return CudaEvent()

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def probe(self) -> None:
        assert self._probe is not None, "a probe of a device without streams"
        self._probe()


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

    def us_since(self, earlier: DeviceEvent) -> float:
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
        self.cuda_stream = torch.cuda.Stream(streams.device)

    def use(self) -> None:
        torch.cuda.set_stream(self.cuda_stream)

    def launch(self, run: Callable[[], object]) -> None:
        with torch.cuda.stream(self.cuda_stream):
            run()

    def copy(self, destination: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.cuda_stream):
            destination.copy_(source, non_blocking=True)

    def record(self, event: DeviceEvent) -> None:
        assert isinstance(event, CudaEvent)
        event.event.record(self.cuda_stream)

    def wait(self, event: DeviceEvent) -> None:
        assert isinstance(event, CudaEvent)
        self.cuda_stream.wait_event(event.event)

    def capture(self, run: Callable[[], object]) -> CudaGraph:
        graph, device = torch.cuda.CUDAGraph(), self._streams.device
        torch.cuda.empty_cache()  # the capture does so too; done before, it does not change `num_bytes`
        before = torch.cuda.memory_reserved(device)
        pool, mode, used = self._streams.pool, "thread_local", torch.cuda.current_stream(device)
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self.cuda_stream, capture_error_mode=mode):
                run()
        except BaseException:
            torch.cuda.set_stream(used)  # the end of a capture that has failed may raise, and leave its stream in use
            raise
        return CudaGraph(graph, torch.cuda.memory_reserved(device) - before)

    def replay(self, graph: DeviceGraph) -> None:
        assert isinstance(graph, CudaGraph)
        with torch.cuda.stream(self.cuda_stream):
            graph.graph.replay()
