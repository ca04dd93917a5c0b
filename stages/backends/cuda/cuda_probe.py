"""The probe of a GPU: finds out after a failed step whether it still computes. For `DeviceGuard`."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import torch

from ...device.device_guard import is_out_of_memory


class CudaProbe:
    """Call it from any thread: waits for the GPU's work, runs a tiny operation on a stream, and waits for that.

    Raises the error of a GPU that is lost, and blocks as long as a GPU hangs. `stream` None: a stream of its own.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if stream is None else stream
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
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            self._number.add_(1)
        self._stream.synchronize()
