"""Copies host arrays to a device without waiting for it, and memory that begins as zeros."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array on the device; on a CPU it shares the array's memory.

    A copy to a GPU goes through pinned memory, in order with the current stream; from pageable memory the host would
    wait for the stream.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU from pages that the system provides on first use; torch would write all of them at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
