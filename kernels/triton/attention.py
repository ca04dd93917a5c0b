"""Attention over a paged cache by Triton: what is launched, for few rows of decode with the prologue before it.

The twins are in `kernels/reference/attention.py` and `kernels/reference/prologue_decode.py`.

Shapes: q [T or S, H, D], a layer's cache [N, G, B, D], block tables [S, M]; T new tokens, S sequences, H query heads,
G key/value heads, D head size, N blocks of B tokens.

The kernel is in `attention_kernel.py`. It walks a work list (`kernels/layout/work_lists.py`), which `attention_plan.py`
makes.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from ..layout.layer_options import HeadNorms
from ..layout.work_lists import AttentionPlan, AttentionShape, WorkItem, WorkList, next_power_of_2, weights_size
from .attention_kernel import attention_kernel
from .attention_plan import plan_attention
from .attention_prologue import attention_prologue
from .attention_tile import LOG2_E
from .folded_prologue import FoldedPrologue, can_fold, kernel_arguments
from .launch import capability, check_dtype, early_launch

# Of a folded prologue each item of attention does its own part: the queries are normed and rotated once for each piece
# of a task. A program of 8 key/value heads has 2 items of 64 sequences, and 6 of 256, where that takes about as long as
# the launch that it saves. A prediction, as no GPU has measured it.
MOST_FOLDED_ROWS = 64
MOST_FOLDED_DIM = 256  # numbers of a head; more of them spill registers
MERGED_ELEMENTS = {"decode": 512, "extend": 256}  # partial sums that a warp joins at a time: more spill registers


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
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
    """See `KernelSet.paged_decode`."""
    check_types(q, k_cache, k_scale)
    plan = (plan or plan_attention(shape_of(q, k_cache, window), lengths, None, len(q))).ready()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    attend(
        out, plan.decode[window], plan.partials, q, k_cache, v_cache, block_tables, scale, window,
        soft_cap, k_scale, v_scale, sinks, alibi, chunk,
    )  # fmt: skip
    return out


def paged_attention(
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
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    chunk: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """See `KernelSet.paged_attention`. Many sequences of one new token have a list and a tile size of their own."""
    check_types(q, k_cache, k_scale)
    plan = (plan or plan_attention(shape_of(q, k_cache, window), lengths, query_starts, len(q))).ready()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for lists in filter(None, (plan.decode, plan.extend)):
        attend(
            out, lists[window], plan.partials, q, k_cache, v_cache, block_tables, scale, window,
            soft_cap, k_scale, v_scale, sinks, alibi, chunk,
        )  # fmt: skip
    return out


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
    is_large = num_rows > MOST_FOLDED_ROWS or head_dim > MOST_FOLDED_DIM
    if is_large or is_fixed or not can_fold(norms, query_factors):
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


def shape_of(q: Tensor, k_cache: Tensor, window: int | None) -> AttentionShape:
    """The attention shape of a call without a plan: of a model whose layers all have this window."""
    return AttentionShape(q.shape[1], k_cache.shape[1], q.shape[2], q.dtype, k_cache.dtype, (window,))


def check_types(q: Tensor, k_cache: Tensor, k_scale: Tensor | None) -> None:
    """Raises TypeError for types that the kernels do not support on this device."""
    check_dtype(q)
    if k_cache.dtype != q.dtype and k_cache.dtype != torch.float8_e4m3fn:
        raise TypeError(f"a cache of {k_cache.dtype} and queries of {q.dtype}: keep the cache in that or float8_e4m3fn")
    if k_cache.dtype == torch.float8_e4m3fn and capability(q.device) < 89:
        raise TypeError("a cache in float8_e4m3fn needs compute capability 8.9 or later; use kv_cache_dtype = auto")


def attend(
    out: Tensor,
    work: WorkList,
    partials: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    chunk: int | None = None,
    folded: FoldedPrologue | None = None,
    extra_dim: int = 0,
) -> None:
    """Does the items of one work list: writes their rows of `out` [T, H, D]. Overwrites `partials` (f32).

    With a `folded` prologue, of decode alone, q is the projection [T, H + 2G, D]. With an `extra_dim` E, queries and
    keys have D + E numbers, and values are the first D of keys; G are then as many as the list has.
    """
    division, tiling = work.division, work.tiling
    if not scale > 0:  # the largest product has to be the largest score
        raise ValueError(f"scale = {scale:g}: the Triton kernels take a scale of scores above 0; use the torch kernels")
    if not division.max_tasks:
        return
    _, num_heads, head_dim = out.shape
    block_size, group = k_cache.shape[2], num_heads // division.num_groups
    block_d = max(16, next_power_of_2(head_dim))
    rows = division.tokens_per_tile * group
    weights = partials  # [partials, rows, 2]: the maximum and the sum of weights
    sums = partials[weights_size(division, rows) :]  # [partials, rows, D]
    merged = MERGED_ELEMENTS[division.kind] * tiling.num_warps
    block_r = min(next_power_of_2(rows), max(1, merged // (4 * block_d)))
    # tanh(x) = 1 - 2 / (exp(2 x) + 1), so a soft cap needs exp2 of the score times this.
    factor = scale * LOG2_E if soft_cap is None else scale * 2 * LOG2_E / soft_cap
    attention_kernel[(division.num_programs,)](
        out, sums, weights, work.arrivals, work.items, work.starts, q, k_cache, v_cache, block_tables,
        q if k_scale is None else k_scale, q if v_scale is None else v_scale, sinks, alibi,
        factor, window or 0, chunk or 0, (soft_cap or 0.0) * LOG2_E, num_heads, q.stride(0), q.stride(1),
        *k_cache.stride(), *v_cache.stride(), block_tables.stride(0),
        GROUP=group, TOKENS=division.tokens_per_tile, IS_DECODE=division.kind == "decode", ITEM=len(WorkItem),
        B=block_size, D=head_dim, BLOCK_D=block_d, BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n,
        HAS_WINDOW=window is not None, HAS_CHUNK=chunk is not None, HAS_CAP=soft_cap is not None,
        HAS_K_SCALE=k_scale is not None, HAS_V_SCALE=v_scale is not None,
        IS_NARROW=k_cache.dtype == torch.float8_e4m3fn and q.dtype != torch.float32,
        **kernel_arguments(folded, q.dtype),
        EXTRA=extra_dim, BLOCK_E=max(16, next_power_of_2(extra_dim)),
        BLOCK_R=block_r, BLOCK_P=max(1, merged // (block_r * block_d)),
        PRECISION=_precision(q.dtype), STAGES=tiling.num_stages, num_warps=tiling.num_warps,
        TOKEN_UNIT=gcd(16, k_cache.stride(2), v_cache.stride(2)), maxnreg=tiling.max_registers, enable_fp_fusion=True,
        **early_launch(q.device),
    )  # fmt: skip


def _precision(dtype: torch.dtype) -> str:
    """The precision of dots: full f32 for f32 inputs, as tf32 would round them to 10 bits."""
    return "ieee" if dtype == torch.float32 else "tf32"
