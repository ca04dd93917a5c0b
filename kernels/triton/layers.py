"""Triton kernels of norms and activations. Their twins are in `kernels/reference/layers.py`.

Shapes: x [T, D] or [T, H, D], gate_up [T, 2F]; T new tokens, H heads, D row size.

All are bound by memory: each element is read once and written once, by one program a token or a part of a token.
Launches request fused multiply-adds explicitly, as Triton 3.10 no longer makes them by default.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..layout.layer_options import Activation
from .launch import check_dtype, early_launch, next_power_of_2, start_early


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See `KernelSet.rms_norm`. One program a row."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    norm_into(out, x, weight, None, eps, is_layer_norm=False)
    return out


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """See `KernelSet.layer_norm`. One program a row."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    norm_into(out, x, weight, bias, eps, is_layer_norm=True)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `KernelSet.add_rms_norm`. One program a row."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    norm_into(out, x, weight, None, eps, is_layer_norm=False, residual=residual)
    return out


def norm_into(
    out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    is_layer_norm: bool,
    residual: Tensor | None = None,
) -> None:
    """Writes the norm of x [T, D] or [T, H, D] to `out`, of the same shape, which may be x itself."""
    check_dtype(x)
    dim = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    block = next_power_of_2(dim)
    _norm_kernel[(x.shape[0] * heads,)](
        out, x, residual, weight, bias, heads, out.stride(0), out.stride(-2), x.stride(0), x.stride(-2),
        0 if residual is None else residual.stride(0), _head_stride(weight), _head_stride(bias), eps,
        D=dim, BLOCK_D=block, IS_LAYER_NORM=is_layer_norm,
        IS_ROUNDED=not is_layer_norm and weight is not None and weight.dtype == x.dtype,
        num_warps=_warps(block), enable_fp_fusion=True, **early_launch(x.device),
    )  # fmt: skip


def _head_stride(weight: Tensor | None) -> int:
    return 0 if weight is None or weight.dim() == 1 else weight.stride(0)


def gated(gate_up: Tensor, activation: Activation, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """See `KernelSet.gated`. One program for up to 1,024 results of a token."""
    check_dtype(gate_up)
    _check(activation, "gated", "xielu")
    num_tokens, double = gate_up.shape
    dim = double // 2
    out = torch.empty((num_tokens, dim), dtype=gate_up.dtype, device=gate_up.device)
    block = _part(dim)
    _gated_kernel[(num_tokens, triton.cdiv(dim, block))](
        out, gate_up, dim, gate_up.stride(0), alpha, limit, ACTIVATION=activation, BLOCK=block, enable_fp_fusion=True,
        **early_launch(out.device),
    )  # fmt: skip
    return out


def activated(x: Tensor, activation: Activation, params: Tensor | None = None) -> Tensor:
    """See `KernelSet.activated`. One program for up to 1,024 results of a token."""
    check_dtype(x)
    _check(activation, "activated", "swiglu_clamped")
    num_tokens, dim = x.shape
    out = torch.empty((num_tokens, dim), dtype=x.dtype, device=x.device)
    block = _part(dim)
    _activated_kernel[(num_tokens, triton.cdiv(dim, block))](
        out, x, params, dim, x.stride(0), ACTIVATION=activation, BLOCK=block, enable_fp_fusion=True,
        **early_launch(out.device),
    )  # fmt: skip
    return out


def _part(dim: int) -> int:
    """Results of a program: 8 elements a thread in 4 warps is one 16-byte access."""
    return min(next_power_of_2(dim), 1024)


def _check(activation: Activation, kernel: str, other: Activation) -> None:
    if activation not in get_args(Activation) or activation == other:
        names = ", ".join(name for name in get_args(Activation) if name != other)
        raise ValueError(f"activation = {activation!r}: {kernel} takes {names}")


def _warps(block: int) -> int:
    """Warps of a program: 8 elements a thread, 16 bytes in half precision; at most 16 warps."""
    return max(1, min(16, block // 256))


@triton.jit
def _norm_kernel(
    out, x, residual, weight, bias, heads, out_row, out_head, x_row, x_head, residual_row, weight_head, bias_head, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, IS_LAYER_NORM: tl.constexpr, IS_ROUNDED: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    start_early(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    token = row // heads
    head = row % heads
    d = tl.arange(0, BLOCK_D)
    is_dim = d < D
    values = tl.load(x + token * x_row + head * x_head + d, mask=is_dim, other=0.0)
    if residual is not None:
        place = residual + row * residual_row + d
        values += tl.load(place, mask=is_dim, other=0.0)  # rounded to the residual's type, as `add_` in the twin does
        tl.store(place, values, mask=is_dim)
    wide = values.to(tl.float32)
    if IS_LAYER_NORM:
        wide = tl.where(is_dim, wide - tl.sum(wide, axis=0) / D, 0.0)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
    if weight is not None:
        factors = tl.load(weight + head * weight_head + d, mask=is_dim, other=0.0)
        normed = normed.to(values.dtype) * factors if IS_ROUNDED else normed * factors.to(tl.float32)
    if bias is not None:
        normed += tl.load(bias + head * bias_head + d, mask=is_dim, other=0.0).to(tl.float32)
    tl.store(out + token * out_row + head * out_head + d, normed.to(values.dtype), mask=is_dim)


@triton.jit
def _gated_kernel(
    out, gate_up, dim, row_stride, alpha, limit, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    start_early(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_dim = d < dim
    gate = tl.load(gate_up + token * row_stride + d, mask=is_dim, other=0.0)
    up = tl.load(gate_up + token * row_stride + dim + d, mask=is_dim, other=0.0)
    product = gate_product(gate, up, alpha, limit, ACTIVATION)
    tl.store(out + token * dim + d, product.to(gate.dtype), mask=is_dim)


@triton.jit
def _activated_kernel(
    out, x, of_activation, dim, row_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    start_early(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_dim = d < dim
    values = tl.load(x + token * row_stride + d, mask=is_dim, other=0.0)
    positive, negative = 0.0, 0.0
    if ACTIVATION == "xielu":
        positive, negative = tl.load(of_activation), tl.load(of_activation + 1)
    results = activate(values.to(tl.float32), positive, negative, ACTIVATION)
    tl.store(out + token * dim + d, results.to(values.dtype), mask=is_dim)


@triton.jit
def gate_product(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """`activation(gate) * up` of numbers in one type: in that type or in f32, to be rounded to it."""
    wide = gate.to(tl.float32)
    if ACTIVATION == "silu":
        product = activate(wide, 0.0, 0.0, ACTIVATION).to(gate.dtype) * up  # rounded before it, as in the twin
    elif ACTIVATION == "swiglu_clamped":
        wide = tl.where(wide > limit, limit, wide)  # NaN stays
        other = up.to(tl.float32)
        other = tl.where(other > limit, limit, tl.where(other < -limit, -limit, other))
        product = wide / (1.0 + tl.exp(-alpha * wide)) * (other + 1.0)
    else:
        product = activate(wide, 0.0, 0.0, ACTIVATION) * up.to(tl.float32)
    return product


@triton.jit
def activate(x, positive, negative, ACTIVATION: tl.constexpr):
    """Of x in f32; the factors of both sides are xielu's. NaN stays NaN."""
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(z)) / 2 is the sigmoid of 2 z
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "relu":
        y = tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "relu2":
        y = tl.where(x < 0, 0.0, x)
        y = y * y
    else:
        tl.static_assert(ACTIVATION == "xielu")
        least = tl.where(x > -1e-6, -1e-6, x)
        # expm1(least) - least, by its series near 0, where the difference would keep few digits
        series = least * least * (0.5 + least * (1 / 6 + least * (1 / 24 + least * (1 / 120 + least * (1 / 720)))))
        difference = tl.where(least > -0.3, series, tl.exp(least) - 1.0 - least) + (least - x)
        y = tl.where(x > 0, positive * x * x, negative * difference) + 0.5 * x
    return y
