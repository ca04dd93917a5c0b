"""Triton kernels of a layer's small steps: norms, RoPE, cache writes, activation. `reference.py` has their twins.

All are bound by memory: each element is read once and written once, one program a token (or a part of one).
Fused multiply-adds are asked for by name, as Triton 3.10 stops making them by default.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_launch import check_dtype, next_power_of_2

HEADS_PER_PROGRAM = 16  # of RoPE and cache writes: 16 heads of 128 are 4 elements a thread and half


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`. x is [T, D] or [T, H, D], contiguous in D."""
    check_dtype(x)
    dim = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = next_power_of_2(dim)
    _rms_norm_kernel[(x.shape[0] * heads,)](
        out, x, x, weight, heads, x.stride(0), x.stride(-2), 0, eps, D=dim, BLOCK_D=block, HAS_RESIDUAL=False,
        num_warps=_warps(block), enable_fp_fusion=True,
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.add_rms_norm`."""
    check_dtype(x)
    dim = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = next_power_of_2(dim)
    _rms_norm_kernel[(x.shape[0],)](
        out, x, residual, weight, 1, x.stride(0), 0, residual.stride(0), eps, D=dim, BLOCK_D=block, HAS_RESIDUAL=True,
        num_warps=_warps(block), enable_fp_fusion=True,
    )  # fmt: skip
    return out


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """See `reference.rope`."""
    check_dtype(q)
    num_tokens, num_heads, _ = q.shape
    num_groups = k.shape[1]
    half = cos.shape[-1]
    grid = (num_tokens, triton.cdiv(max(num_heads, num_groups), HEADS_PER_PROGRAM))
    _rope_kernel[grid](
        q, k, cos, sin, positions, num_heads, num_groups, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        cos.stride(0), sin.stride(0), HALF=half, BLOCK_HALF=next_power_of_2(half), BLOCK_H=HEADS_PER_PROGRAM,
        enable_fp_fusion=True,
    )  # fmt: skip


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `reference.write_kv`. k and v are contiguous in D."""
    check_dtype(k)
    num_tokens, num_groups, head_dim = k.shape
    grid = (num_tokens, triton.cdiv(num_groups, HEADS_PER_PROGRAM))
    _write_kv_kernel[grid](
        k, v, k_cache, v_cache, slot_mapping, num_groups, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *k_cache.stride(), *v_cache.stride(),
        B=k_cache.shape[2], D=head_dim, BLOCK_D=next_power_of_2(head_dim),
        BLOCK_G=min(next_power_of_2(num_groups), HEADS_PER_PROGRAM), enable_fp_fusion=True,
    )  # fmt: skip


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_mul`."""
    check_dtype(gate_up)
    num_tokens, double = gate_up.shape
    dim = double // 2
    out = torch.empty((num_tokens, dim), dtype=gate_up.dtype, device=gate_up.device)
    block = min(next_power_of_2(dim), 1024)  # 8 elements, one 16-byte access, a thread of 4 warps
    grid = (num_tokens, triton.cdiv(dim, block))
    _silu_mul_kernel[grid](out, gate_up, dim, gate_up.stride(0), BLOCK=block, enable_fp_fusion=True)
    return out


def _warps(block: int) -> int:
    """8 elements a thread, 16 bytes in half precision, and no more than 16 warps."""
    return max(1, min(16, block // 256))


@triton.jit
def _rms_norm_kernel(
    out, x, residual, weight, heads, x_row, x_head, residual_row, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    is_dim = d < D
    values = tl.load(x + row // heads * x_row + row % heads * x_head + d, mask=is_dim, other=0.0)
    if HAS_RESIDUAL:
        place = residual + row * residual_row + d
        values += tl.load(place, mask=is_dim, other=0.0)  # rounded to the residual's type, as the twin's add_ does
        tl.store(place, values, mask=is_dim)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
    normed = (wide * scale).to(values.dtype)
    tl.store(out + row * D + d, normed * tl.load(weight + d, mask=is_dim, other=0.0), mask=is_dim)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _rope_kernel(
    q, k, cos, sin, positions, num_heads, num_groups, q_row, q_head, k_row, k_head, cos_row, sin_row,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions + token)
    cosines = tl.load(cos + position * cos_row + d, mask=d < HALF, other=0.0)[None, :]
    sines = tl.load(sin + position * sin_row + d, mask=d < HALF, other=0.0)[None, :]
    is_half = (d < HALF)[None, :]
    q_place = q + token * q_row + head[:, None] * q_head + d[None, :]
    _rotate(q_place, cosines, sines, (head < num_heads)[:, None] & is_half, HALF)
    k_place = k + token * k_row + head[:, None] * k_head + d[None, :]
    _rotate(k_place, cosines, sines, (head < num_groups)[:, None] & is_half, HALF)


@triton.jit
def _rotate(place, cosines, sines, is_pair, HALF: tl.constexpr):
    """Turns the pairs (place[i], place[i + HALF]) by their angles, in place."""
    first = tl.load(place, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=is_pair, other=0.0).to(tl.float32)
    tl.store(place, first * cosines - second * sines, mask=is_pair)
    tl.store(place + HALF, second * cosines + first * sines, mask=is_pair)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _write_kv_kernel(
    k, v, k_cache, v_cache, slot_mapping, num_groups, k_row, k_head, v_row, v_head,
    kc_n, kc_g, kc_b, kc_d, vc_n, vc_g, vc_b, vc_d,
    B: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    block = slot // B  # i64: the offset of a block may exceed 2^31 elements
    offset = slot % B
    g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    is_element = (g < num_groups) & (d < D)
    keys = tl.load(k + token * k_row + g * k_head + d, mask=is_element)
    values = tl.load(v + token * v_row + g * v_head + d, mask=is_element)
    g = g.to(tl.int64)
    tl.store(k_cache + block * kc_n + g * kc_g + offset * kc_b + d * kc_d, keys, mask=is_element)
    tl.store(v_cache + block * vc_n + g * vc_g + offset * vc_b + d * vc_d, values, mask=is_element)


@triton.jit
def _silu_mul_kernel(out, gate_up, dim, row_stride, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_dim = d < dim
    gate = tl.load(gate_up + token * row_stride + d, mask=is_dim, other=0.0)
    up = tl.load(gate_up + token * row_stride + dim + d, mask=is_dim, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)  # rounded here too, as in the twin
    tl.store(out + token * dim + d, activated * up, mask=is_dim)
