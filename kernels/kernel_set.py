"""The choice of kernels: one set of functions with the same signatures, from PyTorch or from Triton.

Triton is imported only when chosen, so that the CPU path works where it is not installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from .layout.work_lists import AttentionPlan, AttentionShape
from .reference import layers_and_attention as reference

BackendName = Literal["torch", "triton"]


class BackendUnavailableError(RuntimeError):
    """The chosen backend cannot run here; the message says what is missing and what to do."""


class PlanAttention(Protocol):
    """`reference.plan_attention`."""

    def __call__(
        self,
        shape: AttentionShape,
        lengths: Tensor,
        query_starts: Tensor | None,
        num_tokens: int,
        num_processors: int | None = None,
    ) -> AttentionPlan | None: ...


class PagedDecode(Protocol):
    """`reference.paged_decode`."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        lengths: Tensor,
        scale: float,
        window: int | None = None,
        *,
        soft_cap: float | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        plan: AttentionPlan | None = None,
    ) -> Tensor: ...


class PagedAttention(Protocol):
    """`reference.paged_attention`."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        lengths: Tensor,
        scale: float,
        window: int | None = None,
        *,
        soft_cap: float | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        plan: AttentionPlan | None = None,
    ) -> Tensor: ...


class AttentionPrologue(Protocol):
    """`reference.attention_prologue`."""

    def __call__(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """The kernels of a decoder. Each does what its namesake in `kernels/reference/layers_and_attention.py` says."""

    name: BackendName
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    attention_prologue: AttentionPrologue
    silu_mul: Callable[[Tensor], Tensor]
    plan_attention: PlanAttention
    paged_decode: PagedDecode
    paged_attention: PagedAttention
    copy_blocks: Callable[[Tensor, int, Tensor, Tensor], None]


def load(name: BackendName) -> Backend:
    """The kernels of that name, ready to call.

    Raises BackendUnavailableError if `triton` is chosen where it is not installed, or where there is neither a GPU nor
    its interpreter (TRITON_INTERPRET=1, set before the process starts).
    """
    if name == "torch":
        return Backend(
            name,
            reference.rms_norm,
            reference.add_rms_norm,
            reference.attention_prologue,
            reference.silu_mul,
            reference.plan_attention,
            reference.paged_decode,
            reference.paged_attention,
            reference.copy_blocks,
        )
    if name != "triton":
        raise ValueError(f"attention_backend = {name!r}: must be 'torch' or 'triton'")
    if importlib.util.find_spec("triton") is None:
        raise BackendUnavailableError(
            "attention_backend = triton: the package triton is not installed (it exists for Linux only); "
            "install it with `pip install triton`, or choose attention_backend = torch"
        )
    from .triton import attention as triton_attention
    from .triton import attention_plan as triton_plan
    from .triton import attention_prologue as triton_prologue
    from .triton import block_copy as triton_copy
    from .triton import launch as triton_launch
    from .triton import layers as triton_layers

    if not (torch.cuda.is_available() or triton_launch.IS_INTERPRETED):
        raise BackendUnavailableError(
            "attention_backend = triton: no CUDA device is visible to torch; choose attention_backend = torch, or, to "
            "check the kernels slowly on a CPU, start the process with TRITON_INTERPRET=1 and dtype = float32"
        )
    return Backend(
        name,
        triton_layers.rms_norm,
        triton_layers.add_rms_norm,
        triton_prologue.attention_prologue,
        triton_layers.silu_mul,
        triton_plan.plan_attention,
        triton_attention.paged_decode,
        triton_attention.paged_attention,
        triton_copy.copy_blocks,
    )
