"""Decode with the attention prologue before it, in one launch where that pays.

Its twin is `kernels/reference/prologue_decode.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout.layer_options import HeadNorms
from ..layout.work_lists import AttentionPlan
from .attention import attend, check_types, paged_decode, shape_of
from .attention_plan import plan_attention
from .attention_prologue import attention_prologue
from .folded_prologue import FoldedPrologue, can_fold

# Of a folded prologue each item of attention does its own part: the queries are normed and rotated once for each piece
# of a task. A program of 8 key/value heads has 2 items of 64 sequences, and 6 of 256, where that takes about as long as
# the launch that it saves. A prediction, as no GPU has measured it.
MOST_FOLDED_ROWS = 64


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
    """See `KernelSet.prologue_decode`. One launch for at most MOST_FOLDED_ROWS sequences, two for more.

    In batch-invariant mode always two, since a row in a mixed step has to get the same bits.
    """
    num_rows, num_heads, head_dim = len(qkv), qkv.shape[1] - 2 * k_cache.shape[1], qkv.shape[2]
    q = qkv[:, :num_heads]
    check_types(q, k_cache, k_scale)
    plan = plan or plan_attention(shape_of(q, k_cache, window), lengths, None, num_rows)
    is_fixed = plan.decode[window].division.is_fixed
    if num_rows > MOST_FOLDED_ROWS or is_fixed or not can_fold(norms, query_factors):
        q = attention_prologue(
            qkv, norms, cos, sin, positions, k_cache, v_cache, slot_mapping, k_scale, v_scale, query_factors
        )
        return paged_decode(
            q, k_cache, v_cache, block_tables, lengths, scale, window, soft_cap=soft_cap, sinks=sinks, alibi=alibi,
            chunk=chunk, k_scale=k_scale, v_scale=v_scale, plan=plan,
        )  # fmt: skip
    assert qkv.stride(2) == 1, "a head's numbers must follow each other"
    out = torch.empty((num_rows, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    attend(
        out, plan.ready().decode[window], plan.partials, qkv, k_cache, v_cache, block_tables, scale, window,
        soft_cap, k_scale, v_scale, sinks, alibi, chunk,
        FoldedPrologue(norms=norms, cos=cos, sin=sin, positions=positions, slot_mapping=slot_mapping),
    )  # fmt: skip
    return out
