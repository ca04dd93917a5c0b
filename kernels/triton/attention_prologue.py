"""The Triton kernel between a layer's fused projection and its attention.

Its twin is `attention_prologue` in `kernels/reference/attention_prologue.py`.

Shapes: qkv [T, H + 2G, D], a layer's cache [N, G, B, D], tables [P, D_rot / 2] f32, positions and slots [T] i64.

Norms of heads, rotary positions and the cache write are one launch; norms over rows are two before it. The projection
is read once; rotated numbers are written once, as a query or into the cache. Roundings are those of the separate steps.

Decode of few rows has no launch for it: the attention kernel does the same to what it loads (`folded_prologue.py`).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..layout.layer_options import HeadNorms
from .launch import check_dtype, early_launch, next_power_of_2, start_early
from .layers import norm_into

HEADS_PER_PROGRAM = 16  # at D = 128, 16 elements a thread
LARGEST_FP8 = tl.constexpr(448.0)  # of e4m3


def attention_prologue(
    qkv: Tensor,
    norms: HeadNorms | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    query_factors: Tensor | None = None,
) -> Tensor:
    """See `KernelSet.attention_prologue`. One program per token and 16 query heads or 16 key/value heads.

    Rotates the queries in place and returns their view of qkv.
    """
    check_dtype(qkv)
    num_tokens, num_heads, head_dim = qkv.shape
    num_groups, block_size = k_cache.shape[1:3]
    num_query_heads = num_heads - 2 * num_groups
    assert (cos is None) == (sin is None) and (k_scale is None) == (v_scale is None)
    assert qkv.stride(2) == 1, "a head's numbers must follow each other"
    if norms is not None and norms.is_over_row:
        if norms.is_after_rope:
            raise NotImplementedError(
                "attention_backend = triton: has no norms over rows of heads after the rotation; use torch"
            )
        _norm_rows(qkv, num_query_heads, num_groups, norms)
        norms = None
    q_norm, k_norm, eps = (norms.q, norms.k, norms.eps) if norms is not None else (None, None, 0.0)
    a_norm = k_norm if q_norm is None else q_norm
    half = 0 if cos is None else cos.shape[1]
    rest = head_dim - 2 * half
    heads = min(next_power_of_2(max(num_query_heads, num_groups)), HEADS_PER_PROGRAM)
    changes_queries = half > 0 or norms is not None or query_factors is not None
    num_query_programs = triton.cdiv(num_query_heads, heads) if changes_queries else 0
    num_programs = num_query_programs + triton.cdiv(num_groups, heads)
    if not num_programs:  # queries that stay, of a layer that reads the cache of another one
        return qkv
    _attention_prologue_kernel[(num_tokens, num_programs)](
        qkv, q_norm, k_norm, cos, sin, query_factors, positions, k_cache, v_cache, slot_mapping, k_scale, v_scale,
        num_query_heads, num_groups, num_query_programs, eps, qkv.stride(0), qkv.stride(1),
        0 if cos is None else cos.stride(0), 0 if sin is None else sin.stride(0), *k_cache.stride(), *v_cache.stride(),
        B=block_size, D=head_dim, HALF=half, BLOCK_HALF=next_power_of_2(max(half, 1)),
        REST=rest, BLOCK_REST=next_power_of_2(max(rest, 1)), BLOCK_D=next_power_of_2(head_dim), BLOCK_H=heads,
        IS_FP8=k_cache.dtype == torch.float8_e4m3fn, NORM=None if norms is None else norms.kind,
        IS_ROUNDED=norms is not None and norms.kind == "rms" and a_norm is not None and a_norm.dtype == qkv.dtype,
        HAS_HEAD_WEIGHTS=a_norm is not None and a_norm.dim() == 2,
        IS_AFTER_ROPE=norms is not None and norms.is_after_rope, enable_fp_fusion=True, **early_launch(qkv.device),
    )  # fmt: skip
    return qkv[:, :num_query_heads]


def _norm_rows(qkv: Tensor, num_query_heads: int, num_groups: int, norms: HeadNorms) -> None:
    """Norms the queries of each token as one row, and its keys, in place: a launch each."""
    keys_end = num_query_heads + num_groups
    for heads, weight in ((qkv[:, :num_query_heads], norms.q), (qkv[:, num_query_heads:keys_end], norms.k)):
        if not heads.shape[1]:
            continue
        rows = heads.view(len(heads), heads.shape[1] * heads.shape[2])
        weight = None if weight is None else weight.flatten()
        norm_into(rows, rows, weight, None, norms.eps, is_layer_norm=norms.kind == "layer")


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _attention_prologue_kernel(
    qkv, q_norm, k_norm, cos, sin, query_factors, positions, k_cache, v_cache, slot_mapping, k_scale, v_scale,
    num_heads, num_groups, num_query_programs, eps, qkv_row, qkv_head, cos_row, sin_row,
    kc_n, kc_g, kc_b, kc_d, vc_n, vc_g, vc_b, vc_d,
    B: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, IS_FP8: tl.constexpr,
    NORM: tl.constexpr, IS_ROUNDED: tl.constexpr, HAS_HEAD_WEIGHTS: tl.constexpr, IS_AFTER_ROPE: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    start_early(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    row = qkv + token * qkv_row
    position = tl.load(positions + token)
    narrow: tl.constexpr = qkv.dtype.element_ty
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    is_pair = pair < HALF
    cosines = tl.full([1, BLOCK_HALF], 1.0, tl.float32)
    sines = tl.zeros([1, BLOCK_HALF], tl.float32)
    if HALF > 0:
        cosines = tl.load(cos + position * cos_row + pair, mask=is_pair, other=0.0)  # [1, HALF] f32
        sines = tl.load(sin + position * sin_row + pair, mask=is_pair, other=0.0)
    if program < num_query_programs:
        head = program * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        is_head = head < num_heads
        place = row + head * qkv_head
        # Numbers that are neither rotated nor normed nor multiplied stay where they are.
        Q_REST: tl.constexpr = REST if NORM is not None or query_factors is not None else 0
        first, second, rest = _turned_head(
            place, head, is_head, cosines, sines, q_norm, eps, D, HALF, BLOCK_HALF, Q_REST, BLOCK_REST,
            NORM, IS_ROUNDED, HAS_HEAD_WEIGHTS, IS_AFTER_ROPE,
        )  # fmt: skip
        if query_factors is not None:
            factor = tl.load(query_factors + position)
            first = first.to(narrow).to(tl.float32) * factor  # rounded first, as separate steps would
            second = second.to(narrow).to(tl.float32) * factor
            rest = (rest.to(tl.float32) * factor).to(narrow)
        tl.store(place + pair, first, mask=is_head & is_pair)
        tl.store(place + HALF + pair, second, mask=is_head & is_pair)
        if Q_REST > 0:
            other = tl.arange(0, BLOCK_REST)[None, :]
            tl.store(place + 2 * HALF + other, rest, mask=is_head & (other < Q_REST))
    else:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            group = (program - num_query_programs) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
            is_group = group < num_groups
            block = slot // B  # i64: the offset of a block may exceed 2^31 elements
            offset = slot % B
            place = row + (num_heads + group) * qkv_head
            first, second, rest = _turned_head(
                place, group, is_group, cosines, sines, k_norm, eps, D, HALF, BLOCK_HALF, REST, BLOCK_REST,
                NORM, IS_ROUNDED, HAS_HEAD_WEIGHTS, IS_AFTER_ROPE,
            )  # fmt: skip
            keys = k_cache + block * kc_n + group.to(tl.int64) * kc_g + offset * kc_b
            scale = tl.load(k_scale + group, mask=is_group, other=1.0) if IS_FP8 else None
            # rounded to the projection's type first, as separate steps would
            _store(keys + pair * kc_d, first.to(narrow), scale, is_group & is_pair, IS_FP8)
            _store(keys + (HALF + pair) * kc_d, second.to(narrow), scale, is_group & is_pair, IS_FP8)
            if REST > 0:
                other = tl.arange(0, BLOCK_REST)[None, :]
                _store(keys + (2 * HALF + other) * kc_d, rest, scale, is_group & (other < REST), IS_FP8)
            d = tl.arange(0, BLOCK_D)[None, :]
            is_element = is_group & (d < D)
            numbers = tl.load(row + (num_heads + num_groups + group) * qkv_head + d, mask=is_element, other=0.0)
            if IS_FP8:
                scale = tl.load(v_scale + group, mask=is_group, other=1.0)
            values = v_cache + block * vc_n + group.to(tl.int64) * vc_g + offset * vc_b
            _store(values + d * vc_d, numbers, scale, is_element, IS_FP8)


@triton.jit
def _turned_head(
    place, head, is_head, cosines, sines, weight, eps,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
    NORM: tl.constexpr, IS_ROUNDED: tl.constexpr, HAS_HEAD_WEIGHTS: tl.constexpr, IS_AFTER_ROPE: tl.constexpr,
):  # fmt: skip
    """Heads [BLOCK_H, D] at `place`, normed and rotated.

    Returns both halves of the rotated part in f32, not rounded unless normed last, and the rest in the memory's type.
    """
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    is_pair = is_head & (pair < HALF)
    first = tl.load(place + pair, mask=is_pair, other=0.0)
    second = tl.load(place + HALF + pair, mask=is_pair, other=0.0)
    rest = first
    if REST > 0:
        other = tl.arange(0, BLOCK_REST)[None, :]
        rest = tl.load(place + 2 * HALF + other, mask=is_head & (other < REST), other=0.0)
    narrow: tl.constexpr = first.dtype
    if NORM is not None and not IS_AFTER_ROPE:
        first, second, rest = _normed_head(
            first, second, rest, weight, head, is_head, eps, D, HALF, BLOCK_HALF, REST, BLOCK_REST,
            NORM, IS_ROUNDED, HAS_HEAD_WEIGHTS,
        )  # fmt: skip
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    turned_first = wide_first * cosines - wide_second * sines
    turned_second = wide_second * cosines + wide_first * sines
    if NORM is not None and IS_AFTER_ROPE:
        first, second, rest = _normed_head(
            turned_first.to(narrow), turned_second.to(narrow), rest, weight, head, is_head, eps,
            D, HALF, BLOCK_HALF, REST, BLOCK_REST, NORM, IS_ROUNDED, HAS_HEAD_WEIGHTS,
        )  # fmt: skip
        turned_first, turned_second = first.to(tl.float32), second.to(tl.float32)
    return turned_first, turned_second, rest


@triton.jit
def _normed_head(
    first, second, rest, weight, head, is_head, eps,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
    NORM: tl.constexpr, IS_ROUNDED: tl.constexpr, HAS_HEAD_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """The parts of heads, zero beyond their ends, normed; each in its own type."""
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    other = tl.arange(0, BLOCK_REST)[None, :]
    narrow: tl.constexpr = first.dtype
    first, second, rest = first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32)
    if NORM == "layer":
        total = row_sum(first) + row_sum(second)
        if REST > 0:
            total += row_sum(rest)
        first = tl.where(pair < HALF, first - total / D, 0.0)
        second = tl.where(pair < HALF, second - total / D, 0.0)
        if REST > 0:
            rest = tl.where(other < REST, rest - total / D, 0.0)
    squares = row_sum(first * first) + row_sum(second * second)
    if REST > 0:
        squares += row_sum(rest * rest)
    scale = tl.rsqrt(squares / D + eps)
    weights = weight
    is_weight = pair < HALF
    is_other = other < REST
    if HAS_HEAD_WEIGHTS:
        weights = weight + head * D
        is_weight = is_head & is_weight
        is_other = is_head & is_other
    first, second = first * scale, second * scale
    if weight is not None:
        first = weighted(first, weights + pair, is_weight, narrow, IS_ROUNDED)
        second = weighted(second, weights + HALF + pair, is_weight, narrow, IS_ROUNDED)
    if REST > 0:
        rest = rest * scale
        if weight is not None:
            rest = weighted(rest, weights + 2 * HALF + other, is_other, narrow, IS_ROUNDED)
    return first.to(narrow), second.to(narrow), rest.to(narrow)


@triton.jit
def row_sum(x):
    return tl.sum(x, axis=1, keep_dims=True)


@triton.jit
def weighted(x, weights, is_weight, narrow: tl.constexpr, IS_ROUNDED: tl.constexpr):
    """x * weights of x in f32; rounded to `narrow` before, and so after as well, if `IS_ROUNDED`."""
    factors = tl.load(weights, mask=is_weight, other=0.0)
    return x.to(narrow) * factors if IS_ROUNDED else x * factors.to(tl.float32)


@triton.jit
def _store(place, x, scale, is_element, IS_FP8: tl.constexpr):
    tl.store(place, as_kept(x, scale, place.dtype.element_ty, IS_FP8), mask=is_element)


@triton.jit
def as_kept(x, scale, kept: tl.constexpr, IS_FP8: tl.constexpr):
    """Numbers in the cache's type."""
    if IS_FP8:
        x = x.to(tl.float32) / scale
        # Beyond it e4m3 has only NaN, which must stay: a broken model shall end with an error, not answer.
        x = tl.maximum(x, -LARGEST_FP8, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, LARGEST_FP8, propagate_nan=tl.PropagateNan.ALL)
    return x.to(kept)
