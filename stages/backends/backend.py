"""What computes a model's steps, ready to run: what `stages/backends/torch/loading.py` and
`stages/backends/native/loading.py` have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..device.device import CallBefore
from ..execute.model_runner import ModelRunner
from ..memory_table import MemoryTable
from ..messages import Rates
from ..sample.sampler import Sampler
from ..sample.token_chooser import Choosing, MakeChoosing
from .cuda.step_update import Ends

if TYPE_CHECKING:
    from .cuda.build import Late  # which imports torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Computing:
    """A runner with its weights and its cache, and what was decided on the way to it."""

    runner: ModelRunner
    backend: str  # native, torch or triton
    device: str
    dtype: str
    quantization: str | None  # how matrices are kept; None: as dtype
    kv_cache_dtype: str
    max_model_len: int  # what was asked for, or what fits
    memory: MemoryTable
    num_host_blocks: int
    max_num_batched_tokens: int
    itl_target_ms: float  # 0: none
    rates: Rates | None
    choosing: MakeChoosing = Choosing
    call_before_computing: CallBefore | None = None  # see `Device`
    enter: Callable[[], object] | None = None  # what the thread that will run the steps is to call first
    own_cpu: int | None = None  # of the thread that begins each step, which a busy neighbour may have for a while
    assemble: Callable[[Sampler, Ends], Late] | None = None  # where the device runs beside the host
