"""The Triton kernel between a layer's fused projection and its attention.

Its twin is `attention_prologue` in `kernels/reference/attention_prologue.py`.

Shapes: qkv [T, H + 2G, D], a layer's cache [N, G, B, D], tables [P, D_rot / 2] f32, positions and slots [T] i64.

Norms of heads, rotary positions and the cache write are one launch. The projection is read once; rotated numbers are
written once, as a query or into the cache. Roundings are those of the separate steps.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..layout.layer_options import HeadNorms
from .launch import check_dtype, next_power_of_2

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
    assert (k_scale is None) == (v_scale is None)
    q_norm, k_norm, eps = (norms.q, norms.k, norms.eps) if norms is not None else (None, None, 0.0)
    is_plain = norms is None or (norms.kind == "rms" and not norms.is_over_row and not norms.is_after_rope)
    if not is_plain or cos is None or sin is None or query_factors is not None:
        raise NotImplementedError("attention_backend = triton: of norms only the RMS norm of heads; use torch")
    assert qkv.stride(2) == 1, "a head's numbers must follow each other"
    half, rest = cos.shape[1], head_dim - 2 * cos.shape[1]
    heads = min(next_power_of_2(max(num_query_heads, num_groups)), HEADS_PER_PROGRAM)
    num_query_programs = triton.cdiv(num_query_heads, heads)
    _attention_prologue_kernel[(num_tokens, num_query_programs + triton.cdiv(num_groups, heads))](
        qkv, q_norm, k_norm, cos, sin, positions, k_cache, v_cache, slot_mapping, k_scale, v_scale,
        num_query_heads, num_groups, num_query_programs, eps, qkv.stride(0), qkv.stride(1),
        cos.stride(0), sin.stride(0), *k_cache.stride(), *v_cache.stride(),
        B=block_size, D=head_dim, HALF=half, BLOCK_HALF=next_power_of_2(half),
        REST=rest, BLOCK_REST=next_power_of_2(max(rest, 1)), BLOCK_D=next_power_of_2(head_dim), BLOCK_H=heads,
        IS_FP8=k_cache.dtype == torch.float8_e4m3fn, enable_fp_fusion=True,
    )  # fmt: skip
    return qkv[:, :num_query_heads]


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _attention_prologue_kernel(
    qkv, q_norm, k_norm, cos, sin, positions, k_cache, v_cache, slot_mapping, k_scale, v_scale,
    num_heads, num_groups, num_query_programs, eps, qkv_row, qkv_head, cos_row, sin_row,
    kc_n, kc_g, kc_b, kc_d, vc_n, vc_g, vc_b, vc_d,
    B: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    row = qkv + token * qkv_row
    position = tl.load(positions + token)
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    is_pair = pair < HALF
    cosines = tl.load(cos + position * cos_row + pair, mask=is_pair, other=0.0)  # [1, HALF] f32
    sines = tl.load(sin + position * sin_row + pair, mask=is_pair, other=0.0)
    if program < num_query_programs:
        head = program * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        is_head = head < num_heads
        place = row + head * qkv_head
        # Numbers that are neither rotated nor normed stay where they are.
        Q_REST: tl.constexpr = REST if q_norm is not None else 0
        first, second, rest = _load_head(place, is_head, q_norm, eps, D, HALF, BLOCK_HALF, Q_REST, BLOCK_REST)
        tl.store(place + pair, first * cosines - second * sines, mask=is_head & is_pair)
        tl.store(place + HALF + pair, second * cosines + first * sines, mask=is_head & is_pair)
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
            first, second, rest = _load_head(place, is_group, k_norm, eps, D, HALF, BLOCK_HALF, REST, BLOCK_REST)
            keys = k_cache + block * kc_n + group.to(tl.int64) * kc_g + offset * kc_b
            narrow: tl.constexpr = qkv.dtype.element_ty
            scale = tl.load(k_scale + group, mask=is_group, other=1.0) if IS_FP8 else None
            # rounded to the projection's type first, as separate steps would
            turned = (first * cosines - second * sines).to(narrow)
            _store(keys + pair * kc_d, turned, scale, is_group & is_pair, IS_FP8)
            turned = (second * cosines + first * sines).to(narrow)
            _store(keys + (HALF + pair) * kc_d, turned, scale, is_group & is_pair, IS_FP8)
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
def _load_head(
    place, is_head, weight, eps,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Heads [BLOCK_H, D] at `place`, normed if there is a weight.

    Returns both halves of the rotated part in f32, and the rest in the type of the memory.
    """
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    other = tl.arange(0, BLOCK_REST)[None, :]
    is_pair = is_head & (pair < HALF)
    first = tl.load(place + pair, mask=is_pair, other=0.0)
    second = tl.load(place + HALF + pair, mask=is_pair, other=0.0)
    rest = first
    if REST > 0:
        rest = tl.load(place + 2 * HALF + other, mask=is_head & (other < REST), other=0.0)
    if weight is not None:
        squares = _sum_of_squares(first) + _sum_of_squares(second)
        if REST > 0:
            squares += _sum_of_squares(rest)
        scale = tl.rsqrt(squares / D + eps)
        first = _normed(first, scale, weight + pair, pair < HALF)
        second = _normed(second, scale, weight + HALF + pair, pair < HALF)
        if REST > 0:
            rest = _normed(rest, scale, weight + 2 * HALF + other, other < REST)
    return first.to(tl.float32), second.to(tl.float32), rest


@triton.jit
def _sum_of_squares(x):
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, axis=1, keep_dims=True)


@triton.jit
def _normed(x, scale, weights, is_weight):
    """x * scale * weights, rounded after each product, as `rms_norm` of the twin does."""
    return (x.to(tl.float32) * scale).to(x.dtype) * tl.load(weights, mask=is_weight, other=0.0)


@triton.jit
def _store(place, x, scale, is_element, IS_FP8: tl.constexpr):
    if IS_FP8:
        x = x.to(tl.float32) / scale
        x = tl.minimum(tl.maximum(x, -LARGEST_FP8), LARGEST_FP8)  # beyond it e4m3 has only NaN
    tl.store(place, x.to(place.dtype.element_ty), mask=is_element)
