"""Copies of LoRA adapters into their device slots, on a stream of their own beside the steps."""

from __future__ import annotations

from typing import Any

from ....runtime.device_streams.interface import DeviceStreams


class AdapterCopies:
    """A copy waits for nothing: the scheduler loads a slot when no step in flight reads it. See `StepSubmitter`."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._stream = streams.stream("adapters")
        self.done = streams.event()  # of the last copy

    def copy(self, destination: Any, source: Any) -> None:
        """Submits a copy to the device. Both arrays are in use until it is done."""
        self._stream.copy(destination, source)
        self._stream.record(self.done)
