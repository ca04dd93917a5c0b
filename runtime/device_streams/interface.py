"""What a device is asked besides computing: work in order on a stream, events between streams, copies, graphs.

The words are CUDA's. Knows nothing of tensors: an array is whatever the implementation copies. `simulated.py` has one
that runs late and out of order, as far as it may; the one for a GPU is beside the code that imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Event(Protocol):
    """A place in a stream's work, marked by `Stream.record`; marked again, it is the later place. One that was never
    recorded has happened."""

    def query(self) -> bool:
        """Whether all work before it is done. Never waits."""

    def wait(self) -> None:
        """Returns when all work before it is done. The calling thread sleeps meanwhile. Raises what the device
        raised."""

    def us_since(self, earlier: Event) -> float:
        """Microseconds on the device's clock from `earlier` to this one, negative if it came first. Both have been
        recorded, and have happened."""


class Graph(Protocol):
    """Work that was captured: the launches of one function, to be submitted again by `Stream.replay`."""

    @property
    def num_bytes(self) -> int:
        """Of the device's memory that capturing it took."""


class Stream(Protocol):
    """Work that is done in the order it was submitted. Nothing here waits for the device.

    What two streams do has no order but by events: work behind `wait(event)` begins when that event has happened, as
    it was recorded last at the time of the call.
    """

    name: str

    def use(self) -> None:
        """Work that the calling thread submits from now on past this interface goes to this stream, too."""

    def launch(self, run: Callable[[], object]) -> None:
        """Submits what `run()` does to the device: kernels. `run` itself may be called now or later."""

    def copy(self, destination: Any, source: Any) -> None:
        """Submits a copy between arrays of one size, on the device or in pinned memory of the host. Both are in use
        until it is done."""

    def record(self, event: Event) -> None: ...
    def wait(self, event: Event) -> None: ...

    def capture(self, run: Callable[[], object]) -> Graph:
        """The launches of `run()` on this stream, which are not done now. In it nothing is copied, recorded or waited
        for."""

    def replay(self, graph: Graph) -> None:
        """Submits the graph's launches again, which read and write the same memory."""


class Streams(Protocol):
    """One device."""

    def stream(self, name: str) -> Stream:
        """A new stream."""

    def event(self) -> Event:
        """A new event."""

    def wait(self) -> None:
        """Returns when everything that was submitted is done. Raises what the device raised."""
