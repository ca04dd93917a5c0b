"""Decode with the attention prologue before it, in plain PyTorch, on any device.

Its twin is in `kernels/triton/attention.py`.
"""

from __future__ import annotations

from torch import Tensor

from ..layout.layer_options import HeadNorms
from ..layout.work_lists import AttentionPlan
from .attention import paged_decode
from .attention_prologue import attention_prologue


def prologue_decode(
    qkv: Tensor,
    norms: HeadNorms | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    query_factors: Tensor | None,
    block_tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    *,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    chunk: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """See `KernelSet.prologue_decode`."""
    q = attention_prologue(
        qkv, norms, cos, sin, positions, k_cache, v_cache, slot_mapping, k_scale, v_scale, query_factors
    )
    return paged_decode(
        q, k_cache, v_cache, block_tables, lengths, scale, window, soft_cap=soft_cap, sinks=sinks, alibi=alibi,
        chunk=chunk, k_scale=k_scale, v_scale=v_scale, plan=plan,
    )  # fmt: skip
