"""Helpers of all Triton launches: the interpreter's limits, the device's properties, and early launches.

An *early* launch begins while the launches ahead of it still run (CUDA: programmatic dependent launch). It may read
weights, which no launch writes, and then waits until all memory that those launches write is visible.

    @triton.jit
    def _kernel(..., IS_EARLY: tl.constexpr):
        start_early(IS_EARLY)  # before all reads and writes of what launches write
        ...

    _kernel[grid](..., **early_launch(x.device))

Three rules make a chain of early launches as safe as one that is not. `kernels/checks/early_check.py` checks 1 and 2.

1. Every program waits, even one that has nothing to do. The next launch waits for this one alone: if a program of this
   one ended without waiting, the end of this launch would not imply the end of those before it.
2. Before it waits, a program reads only weights, and writes nothing. Partial sums and counters are no weights.
3. A launch says that the next one may begin only after all its programs have begun, as each of them says so.
"""

# mypy: disable-error-code="no-any-return, no-untyped-def, untyped-decorator"

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..layout.work_lists import next_power_of_2 as next_power_of_2

EARLY_CAPABILITY = 90  # the first with early launches
IS_INTERPRETED: bool = bool(triton.knobs.runtime.interpret)  # read at import, as kernels are decorated then
SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(slots=True)
class LaunchSwitches:
    """What launches may do on a new kind of device. Read at each launch, and at each capture of a graph.

    The benchmark tries both first on a device, and takes back what does not hold there.
    """

    early: bool = True  # launches may begin before those ahead have ended, see above
    branches: bool = True  # a captured graph may have branches, see `attention_plan.py`

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> LaunchSwitches:
        """MILLRACE_EARLY_LAUNCH and MILLRACE_GRAPH_BRANCHES: 0 is off."""
        return cls(environment.get("MILLRACE_EARLY_LAUNCH") != "0", environment.get("MILLRACE_GRAPH_BRANCHES") != "0")


SWITCHES = LaunchSwitches.of(os.environ)


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


def early_launch(device: torch.device) -> dict[str, Any]:
    """The arguments of a launch that may begin early: the kernel's `IS_EARLY`, and the option for the driver.

    Never early before compute capability 9.0, and in the interpreter.
    `SWITCHES` may forbid it: then every launch waits for the end of the one before it.
    """
    if IS_INTERPRETED or not SWITCHES.early or capability(device) < EARLY_CAPABILITY:
        return {"IS_EARLY": False}
    return {"IS_EARLY": True, "launch_pdl": True}


@triton.jit
def start_early(IS_EARLY: tl.constexpr):
    """Lets the next launch begin, then waits for the launches ahead. For kernels that read no weights before."""
    let_next_begin(IS_EARLY)
    wait_for_earlier(IS_EARLY)


@triton.jit
def let_next_begin(IS_EARLY: tl.constexpr):
    """Lets the next launch begin once every program of this one has called this, or has ended."""
    if IS_EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_earlier(IS_EARLY: tl.constexpr):
    """Waits until all launches ahead have ended and what they wrote is visible to this program."""
    if IS_EARLY:
        gdc_wait()
