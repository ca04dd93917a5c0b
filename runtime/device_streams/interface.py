"""Interface of a device's streams: ordered work, events between streams, copies, graphs.

The terms are CUDA's. Arrays are whatever the implementation can copy; this file does not depend on torch.
`simulated.py` implements it with late, randomly interleaved work. The GPU's implementation is beside the torch code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class DeviceEvent(Protocol):
    """A point in a stream's work, marked by `DeviceStream.record`. Recording it again moves it.

    An event that was never recorded counts as done.
    """

    def query(self) -> bool:
        """Whether all work before the event is done. Never waits."""

    def wait(self) -> None:
        """Waits until all work before the event is done. The calling thread sleeps.

        Raises the device's error, if any.
        """

    def us_since(self, earlier: DeviceEvent) -> float:
        """Microseconds on the device's clock from `earlier` to this event.

        Negative if this one came first. Both must have been recorded and be done.
        """


class DeviceGraph(Protocol):
    """Captured work: the launches of one function, which `DeviceStream.replay` submits again."""

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory that the capture took."""


class DeviceStream(Protocol):
    """Work that runs in the order of submission. No method waits for the device.

    Two streams are ordered by events only: work submitted after `wait(event)` begins when that event is done, as last
    recorded at the time of the call.
    """

    name: str

    def use(self) -> None:
        """Directs the calling thread's work outside this interface to this stream, from now on."""

    def launch(self, run: Callable[[], object]) -> None:
        """Submits what `run()` does on the device: kernels. `run` itself may be called now or later."""

    def copy(self, destination: Any, source: Any) -> None:
        """Submits a copy between arrays of the same size, on the device or in pinned host memory.

        Both arrays are in use until the copy is done.
        """

    def record(self, event: DeviceEvent) -> None: ...
    def wait(self, event: DeviceEvent) -> None: ...

    def capture(self, run: Callable[[], object]) -> DeviceGraph:
        """Captures the launches of `run()` on this stream without executing them.

        `run` must not copy, record or wait.
        """

    def replay(self, graph: DeviceGraph) -> None:
        """Submits the graph's launches again. They read and write the same memory as at the capture."""


class DeviceStreams(Protocol):
    """One device."""

    def stream(self, name: str) -> DeviceStream:
        """A new stream."""

    def event(self) -> DeviceEvent:
        """A new event."""

    def wait(self) -> None:
        """Waits until all submitted work is done. Raises the device's error, if any."""

    def free_bytes(self) -> int:
        """Bytes of the device's memory that no process uses."""

    def probe(self) -> None:
        """Submits a tiny operation after all other work, and waits for it.

        Raises the device's error if it is one that stays. From any thread, at any time, also during other calls.
        """
