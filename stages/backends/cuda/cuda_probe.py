"""The probe of a GPU: finds out after a failed step whether it still computes. For `DeviceGuard`."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...device.device_guard import is_out_of_memory


class CudaProbe:
    """Call it from any thread: waits for the GPU's work, runs a tiny operation on a stream, and waits for that.

    Raises the error of a GPU that is lost, and blocks as long as a GPU hangs. `streams` are those with work, and may
    grow; the tiny operation runs on the first. Without, on the default stream. A waiting thread sleeps: one that spins
    would take a core from those that serve, for as long as the limit of a slow step is.
    """

    def __init__(self, device: torch.device, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        self._device = device
        self._streams = streams
        self._number = torch.zeros(1, dtype=torch.int32, device=device)
        self._number.add_(1)  # loads its kernel now, which takes memory

    def __call__(self) -> None:
        """Tries twice: the first call may only report an earlier error that does not stay."""
        try:
            self._try()
        except Exception:
            try:
                self._try()
            except Exception as error:
                if not is_out_of_memory(error):  # a lost device reports the error that it was lost by
                    raise

    def _try(self) -> None:
        streams = list(self._streams) or [torch.cuda.default_stream(self._device)]
        for stream in streams:
            self._wait(stream)
        with torch.cuda.stream(streams[0]):
            self._number.add_(1)
        self._wait(streams[0])

    def _wait(self, stream: torch.cuda.Stream) -> None:
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        event.synchronize()
