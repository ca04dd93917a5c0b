"""What all launches of Triton kernels share: the interpreter's limits, sizes, the device's width."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import triton

from ..layout.work_lists import next_power_of_2 as next_power_of_2

IS_INTERPRETED: bool = bool(triton.knobs.runtime.interpret)  # as of the import, which is when kernels are decorated
SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _mend_loop_bounds() -> None:
    """Lets the interpreter of Triton before 3.9 take loop bounds computed in a kernel, with numpy >= 2.4 too."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index


if IS_INTERPRETED and tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9):
    _mend_loop_bounds()


def check_dtype(x: Tensor) -> None:
    """Raises TypeError for types that the kernels cannot take here."""
    if x.dtype not in SUPPORTED_DTYPES:
        raise TypeError(f"Triton kernels take float32, float16 or bfloat16, got {x.dtype}; cast it, or use torch")
    if IS_INTERPRETED and x.dtype == torch.bfloat16:
        # Its arithmetic runs on the raw 16 bits and is silently wrong by orders of magnitude.
        raise TypeError(
            "Triton's interpreter cannot compute in bfloat16; use float32 or float16, or unset TRITON_INTERPRET"
        )


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Programs that run side by side on `device`; 1 where there is no GPU (the interpreter)."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def capability(device: torch.device) -> int:
    """The device's compute capability, 90 for 9.0; 90 where there is no GPU (the interpreter)."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
