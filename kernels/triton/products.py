"""Launches of matrix products of few rows, with the norm before and what follows inside.

Their twins are in `kernels/reference/products.py`; the kernels, and how they work, are in `product_kernels.py`. Shapes:
x [M, K], weight [N, K] or [2N, K]. A product without a form for its number of rows is composed of separate launches.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import triton

from ..layout.layer_options import Activation
from ..layout.products import AnyLinear, FewRows, RowNorm
from ..reference.products import ComposedProducts
from ..tilings.products import ProductForm, ProductKind
from . import layers
from .launch import check_dtype, early_launch, next_power_of_2
from .product_kernels import split_kernel, vector_kernel

LINE_BYTES = 128
EARLY_LINES = 64  # of a row of the weight, fetched by a program that has to wait: 8 KiB

_composed = ComposedProducts(layers.rms_norm, layers.layer_norm, layers.gated, layers.activated)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Epilogue:
    """What follows a product, inside of its kernel."""

    kind: ProductKind = "plain"
    activation: Activation | None = None
    alpha: float = 0.0
    limit: float = 0.0
    params: Tensor | None = None


PLAIN, ADD = Epilogue(), Epilogue(kind="add")


def norm_linear(x: Tensor, norm: RowNorm | None, linear: AnyLinear, few: FewRows | None = None) -> Tensor:
    """See `KernelSet.norm_linear`."""
    form = None if few is None else few.form(len(x))
    if few is None or form is None:
        return _composed.norm_linear(x, norm, linear)
    return _product(x, norm, few, form, PLAIN)


def gated_linear(
    x: Tensor,
    norm: RowNorm | None,
    linear: AnyLinear,
    activation: Activation,
    alpha: float = 1.702,
    limit: float = 7.0,
    few: FewRows | None = None,
) -> Tensor:
    """See `KernelSet.gated_linear`."""
    form = None if few is None else few.form(len(x))
    if few is None or form is None:
        return _composed.gated_linear(x, norm, linear, activation, alpha, limit)
    return _product(x, norm, few, form, Epilogue(kind="gated", activation=activation, alpha=alpha, limit=limit))


def activated_linear(
    x: Tensor,
    norm: RowNorm | None,
    linear: AnyLinear,
    activation: Activation,
    params: Tensor | None = None,
    few: FewRows | None = None,
) -> Tensor:
    """See `KernelSet.activated_linear`."""
    form = None if few is None else few.form(len(x))
    if few is None or form is None:
        return _composed.activated_linear(x, norm, linear, activation, params)
    return _product(x, norm, few, form, Epilogue(kind="activated", activation=activation, params=params))


def linear_add(residual: Tensor, x: Tensor, linear: AnyLinear, few: FewRows | None = None) -> Tensor:
    """See `KernelSet.linear_add`."""
    form = None if few is None else few.form(len(x))
    if few is None or form is None:
        return _composed.linear_add(residual, x, linear)
    multiply(residual, x, None, few, form, ADD)
    return residual


def _product(x: Tensor, norm: RowNorm | None, few: FewRows, form: ProductForm, epilogue: Epilogue) -> Tensor:
    num_outputs = len(few.weight) // (2 if epilogue.kind == "gated" else 1)
    out = torch.empty((len(x), num_outputs), dtype=x.dtype, device=x.device)
    if norm is not None and not form.fuses_norm:
        x, norm = _composed.norm(x, norm), None
    multiply(out, x, norm, few, form, epilogue)
    return out


def multiply(out: Tensor, x: Tensor, norm: RowNorm | None, few: FewRows, form: ProductForm, epilogue: Epilogue) -> None:
    """Writes the product to `out` [M, N], or adds it with `kind = "add"`, in that form, for any number of rows."""
    check_dtype(x)
    weight = few.weight
    (num_rows, num_inner), num_outputs = x.shape, out.shape[1]
    if not out.numel():
        return
    is_gated = epilogue.kind == "gated"
    assert weight.shape == (num_outputs * (1 + is_gated), num_inner) and weight.dtype == x.dtype == out.dtype
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1, "the numbers of a row must follow each other"
    tiles = triton.cdiv(num_outputs, form.block_n), triton.cdiv(num_rows, form.block_m)
    shared = dict(
        BLOCK_M=form.block_m, BLOCK_N=form.block_n, BLOCK_K=form.block_k,
        NORM=_norm_mode(x, norm), KIND=epilogue.kind, ACTIVATION=epilogue.activation or "",
        EVEN_N=num_outputs % form.block_n == 0, EVEN_K=num_inner % form.block_k == 0,
        num_warps=form.num_warps, maxnreg=form.max_registers, enable_fp_fusion=True, **early_launch(x.device),
    )  # fmt: skip
    numbers = (num_rows, num_outputs, num_inner, x.stride(0), weight.stride(0), out.stride(0))
    of_norm = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
    others = (few.bias, *of_norm[:2], epilogue.params, of_norm[2], epilogue.alpha, epilogue.limit)
    if form.form == "vector":
        vector_kernel[tiles](
            out, x, weight, *others, *numbers,
            VECTOR=16 // x.itemsize, IS_WHOLE=num_inner <= form.block_k, **shared,
        )  # fmt: skip
        return
    split_size, num_splits = split_of(num_inner, form)
    partials, counters = _join_memory(x, few, form, tiles[0] * tiles[1], num_splits, is_gated)
    line = LINE_BYTES // x.itemsize
    split_kernel[(*tiles, num_splits)](
        out, x, weight, partials, counters, *others, *numbers, split_size,
        SPLITS=num_splits, IS_SWAPPED=form.is_swapped, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        STAGES=form.num_stages, LINE=line, LINES=min(EARLY_LINES, next_power_of_2(triton.cdiv(split_size, line))),
        **shared,
    )  # fmt: skip


def split_of(num_inner: int, form: ProductForm) -> tuple[int, int]:
    """Numbers of K in a split, and how many splits that makes: fewer than asked for if some would have none."""
    num_steps = triton.cdiv(num_inner, form.block_k)
    split_size = triton.cdiv(num_steps, form.num_splits) * form.block_k
    return split_size, triton.cdiv(num_inner, split_size)


def _join_memory(
    x: Tensor, few: FewRows, form: ProductForm, num_tiles: int, num_splits: int, is_gated: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Partial sums and counters of a product that is cut into splits."""
    if num_splits == 1:
        return None, None
    assert few.counters is not None and len(few.counters) >= num_tiles, f"too few counters for {num_tiles} tiles"
    size = num_tiles * num_splits * (1 + is_gated) * form.block_m * form.block_n
    return torch.empty(size, dtype=torch.float32, device=x.device), few.counters


def _norm_mode(x: Tensor, norm: RowNorm | None) -> str:
    """How the kernel norms x: `rounded` is an RMS norm that rounds before its weight as well."""
    if norm is None:
        return "none"
    if norm.kind == "layer":
        return "layer"
    return "rounded" if norm.weight is not None and norm.weight.dtype == x.dtype else "rms"
