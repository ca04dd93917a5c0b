"""Triton kernels of norms and activation. Their twins are in `kernels/reference/layers.py`.

Shapes: x [T, D] or [T, H, D], gate_up [T, 2F]; T new tokens, H heads, D row size.

All are bound by memory: each element is read once and written once, by one program a token or a part of a token.
Launches request fused multiply-adds explicitly, as Triton 3.10 no longer makes them by default.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

from .launch import check_dtype, next_power_of_2


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `KernelSet.rms_norm`. One program a row."""
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
    """See `KernelSet.add_rms_norm`. One program a row."""
    check_dtype(x)
    dim = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = next_power_of_2(dim)
    _rms_norm_kernel[(x.shape[0],)](
        out, x, residual, weight, 1, x.stride(0), 0, residual.stride(0), eps, D=dim, BLOCK_D=block, HAS_RESIDUAL=True,
        num_warps=_warps(block), enable_fp_fusion=True,
    )  # fmt: skip
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `KernelSet.silu_mul`. One program for up to 1,024 results of a token."""
    check_dtype(gate_up)
    num_tokens, double = gate_up.shape
    dim = double // 2
    out = torch.empty((num_tokens, dim), dtype=gate_up.dtype, device=gate_up.device)
    block = min(next_power_of_2(dim), 1024)  # 8 elements a thread in 4 warps: one 16-byte access
    grid = (num_tokens, triton.cdiv(dim, block))
    _silu_mul_kernel[grid](out, gate_up, dim, gate_up.stride(0), BLOCK=block, enable_fp_fusion=True)
    return out


def _warps(block: int) -> int:
    """Warps of a program: 8 elements a thread, 16 bytes in half precision; at most 16 warps."""
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
        values += tl.load(place, mask=is_dim, other=0.0)  # rounded to the residual's type, as `add_` in the twin does
        tl.store(place, values, mask=is_dim)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
    normed = (wide * scale).to(values.dtype)
    tl.store(out + row * D + d, normed * tl.load(weight + d, mask=is_dim, other=0.0), mask=is_dim)


@triton.jit
def _silu_mul_kernel(out, gate_up, dim, row_stride, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_dim = d < dim
    gate = tl.load(gate_up + token * row_stride + d, mask=is_dim, other=0.0)
    up = tl.load(gate_up + token * row_stride + dim + d, mask=is_dim, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)  # rounded before the product, as in the twin
    tl.store(out + token * dim + d, activated * up, mask=is_dim)
