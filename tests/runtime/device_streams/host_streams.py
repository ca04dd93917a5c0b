"""Streams without a device: all work runs at once, on the thread that submits it.

Code for an asynchronous device runs with them on a host without one, with the same calls and memory. Nothing overlaps,
so errors in the order of events do not show; `runtime/device_streams/simulated.py` finds those.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from millrace.runtime.device_streams.interface import DeviceEvent, DeviceGraph


class HostStreams:
    """Arrays are copied by `to[...] = source`: numpy's, or tensors on a CPU. An operation's error is raised to its
    submitter."""

    def stream(self, name: str) -> HostStream:
        return HostStream(name)

    def event(self) -> HostEvent:
        return HostEvent()

    def wait(self) -> None:
        pass

    def free_bytes(self) -> int:
        return 0

    def probe(self) -> None:
        pass


class HostEvent:
    """It is done when it is recorded."""

    def __init__(self) -> None:
        self.at_ns = 0

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def us_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, HostEvent)
        return (self.at_ns - earlier.at_ns) / 1000


class HostGraph:
    """The captured launches."""

    num_bytes = 0

    def __init__(self) -> None:
        self.launches: list[Callable[[], object]] = []


class HostStream:
    """See `DeviceStream`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._captured: HostGraph | None = None

    def use(self) -> None:
        pass

    def launch(self, run: Callable[[], object]) -> None:
        if self._captured is not None:
            self._captured.launches.append(run)
        else:
            run()

    def copy(self, destination: Any, source: Any) -> None:
        assert self._captured is None, "a copy while a graph is captured"
        destination[...] = source

    def record(self, event: DeviceEvent) -> None:
        assert isinstance(event, HostEvent) and self._captured is None
        event.at_ns = time.monotonic_ns()

    def wait(self, event: DeviceEvent) -> None:
        assert self._captured is None, "a wait while a graph is captured"

    def capture(self, run: Callable[[], object]) -> HostGraph:
        assert self._captured is None, "a capture inside a capture"
        self._captured = HostGraph()
        try:
            run()
            return self._captured
        finally:
            self._captured = None

    def replay(self, graph: DeviceGraph) -> None:
        assert isinstance(graph, HostGraph)
        for run in graph.launches:
            run()
