"""`Backend`: a loaded backend. `torch/loading.py` and `native/loading.py` each make one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...kernels.layout.state_layout import StateLayout
from ..device.device import CallBefore
from ..engine_settings import ModelImpl
from ..execute.model_runner import ModelRunner
from ..memory_table import MemoryTable
from ..messages import Rates
from ..outputs import WeightUse
from ..sample.sampler import Sampler
from ..sample.token_chooser import MakeTokenChooser, TokenChooser
from .cuda.step_update import EndRules

if TYPE_CHECKING:
    from ...model.lora.adapter import Adapter
    from ...model.lora.prepared import PreparedAdapter
    from .cuda.build import AsyncRuntime  # which imports torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Backend:
    """A runner with its weights and its cache, and the settings resolved while loading it."""

    runner: ModelRunner
    backend: str  # native, torch or triton
    model_impl: ModelImpl = "millrace"  # whose modules compute a step
    device: str
    dtype: str
    quantization: str | None  # format of the weight matrices; None: as dtype
    weights: WeightUse | None = None
    kv_cache_dtype: str
    max_model_len: int  # as configured, or what fits
    memory: MemoryTable
    num_host_blocks: int  # of kind 0
    num_more_host_blocks: tuple[int, ...] = ()  # of the other kinds
    max_num_batched_tokens: int
    itl_target_ms: float  # 0: none
    rates: Rates | None
    states: StateLayout | None = None  # see `ModelInfo`
    chooser: MakeTokenChooser = TokenChooser
    call_before_computing: CallBefore | None = None  # see `Device`
    enter: Callable[[], object] | None = None  # first call on the device thread
    probe: Callable[[], object] | None = None  # finds out whether the device is lost, see `Device`; None: it cannot be
    watch: CallBefore | None = None  # calls back when the device may be lost, see `Device`
    own_cpu: int | None = None  # pinned to the thread that starts each step; another process may occupy it for a while
    adapter_dtypes: tuple[str, ...] = ()  # that adapters may have instead of `dtype`
    # packs each adapter that is read, on the reading thread; None: the runner takes it as it is
    prepare_adapter: Callable[[Adapter], PreparedAdapter[Any]] | None = None
    close: Callable[[], object] | None = None  # ends what computes in other processes; None: nothing does
    assemble: Callable[[Sampler, EndRules], AsyncRuntime] | None = (
        None  # builds an asynchronous device; None: steps are waited for
    )
