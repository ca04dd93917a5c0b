"""From the host's arrays to tensors on a device, without a wait."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array on the device; on a CPU the same memory. To a GPU it goes through pinned memory, in order with what
    else the current stream does: from other memory the host would wait until the stream gets there."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
