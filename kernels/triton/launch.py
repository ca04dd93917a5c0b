"""Helpers of all Triton launches: the interpreter's limits, and the device's capability and multiprocessors."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import triton

from ..layout.work_lists import next_power_of_2 as next_power_of_2

IS_INTERPRETED: bool = bool(triton.knobs.runtime.interpret)  # read at import, as kernels are decorated then
SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _mend_loop_bounds() -> None:
    """Makes the interpreter of Triton < 3.9 accept loop bounds computed in a kernel with numpy >= 2.4."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index


if IS_INTERPRETED and tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9):
    _mend_loop_bounds()


def check_dtype(x: Tensor) -> None:
    """Raises TypeError for types that the kernels do not support, or not in the interpreter."""
    if x.dtype not in SUPPORTED_DTYPES:
        raise TypeError(f"Triton kernels take float32, float16 or bfloat16, got {x.dtype}; cast it, or use torch")
    if IS_INTERPRETED and x.dtype == torch.bfloat16:
        # NOTE: the interpreter computes on the raw 16 bits, so results are silently wrong by orders of magnitude.
        raise TypeError(
            "Triton's interpreter cannot compute in bfloat16; use float32 or float16, or unset TRITON_INTERPRET"
        )


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """The multiprocessors of `device`; 1 without a GPU (the interpreter)."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def capability(device: torch.device) -> int:
    """The device's compute capability, 90 for 9.0; 90 without a GPU (the interpreter)."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
