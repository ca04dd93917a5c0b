"""Trials of kernels that fold several launches into one: decode with its prologue, and products of few rows.

Decode is held against the two kernels apart in plain PyTorch, in the same type on the same device, as its roundings are
the same; products against float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from millrace.kernels.checks import roofline
from millrace.kernels.checks.roofline import LaunchCost
from millrace.kernels.kernel_set import HeadNorms, KernelSet
from millrace.kernels.layout.products import FewRows, RowNorm, num_counters
from millrace.kernels.reference import kernel_set as twins
from millrace.kernels.tilings.products import ProductForm, ProductKind
from millrace.model.decoder.linear import Linear
from tests.bench.gpu.trials import oracle
from tests.bench.gpu.trials.layers import EPS, Widths
from tests.bench.gpu.trials.trial import Tensors, Trial, far, unlike
from tests.kernels.paged import PagedCase

BLOCK_SIZE = 16
LENGTHS = (1, 2, 17, 0, 64, 65, 200)  # an item's tile has 64 tokens or fewer
NUM_POSITIONS = 256

FORMS = {
    "vectors": ProductForm(form="vector", block_m=8, block_n=4, block_k=256, num_warps=1, fuses_norm=True),
    "split": ProductForm(form="split", block_m=16, block_n=32, block_k=64, num_splits=3, num_stages=3),
    "swapped": ProductForm(form="split", block_m=16, block_n=64, block_k=64, is_swapped=True, fuses_norm=True),
}
SIZES: tuple[tuple[int, int, int], ...] = ((1, 96, 512), (5, 42, 272), (8, 128, 400))  # M, N, K
KINDS: dict[ProductKind, str] = {"plain": "norm_linear", "gated": "gated_linear", "add": "linear_add"}


def folded_trials(
    kernels: KernelSet, widths: Widths, dtype: torch.dtype, draw: Generator, *, is_small: bool
) -> Iterator[Trial]:
    """Decode of some sequences, whose last tokens are in the projection alone, and products in each form."""
    for has_norms in (False, True):
        yield decode_trial(kernels, widths, LENGTHS[1:4] if is_small else LENGTHS, dtype, draw, has_norms=has_norms)
    for size in SIZES[1:2] if is_small else SIZES:
        for name, form in FORMS.items():
            for kind in KINDS:
                yield product_trial(kernels, name, form, kind, size, dtype, draw)


# ---- decode ---------------------------------------------------------------------------------------------------------


def decode_trial(
    kernels: KernelSet,
    widths: Widths,
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    draw: Generator,
    *,
    has_norms: bool = False,
) -> Trial:
    """The cache is poisoned where the new tokens go."""
    heads, groups, dim, device = widths.num_heads, widths.num_groups, widths.head_dim, draw.device
    num_blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    ids = torch.randperm(sum(num_blocks), generator=draw, device=device).int()
    tables = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int32, device=device)
    for row, own in enumerate(ids.split(num_blocks)):
        tables[row, : len(own)] = own
    data = _randn(draw, sum(num_blocks), 2, groups, BLOCK_SIZE, dim, dtype=dtype)
    last = torch.tensor([max(0, length - 1) for length in lengths], device=device)
    blocks = tables.gather(1, (last // BLOCK_SIZE)[:, None])[:, 0].long()
    is_row = torch.tensor(lengths, device=device) > 0
    slots = torch.where(is_row, blocks * BLOCK_SIZE + last % BLOCK_SIZE, -1)
    data[blocks[is_row], :, :, last[is_row] % BLOCK_SIZE] = torch.nan
    qkv = _randn(draw, len(lengths), heads + 2 * groups, dim, dtype=dtype)
    weights = _randn(draw, 2, dim, dtype=dtype)
    norms = HeadNorms(q=weights[0], k=weights[1], eps=EPS) if has_norms else None
    angles = torch.rand(NUM_POSITIONS, dim // 2, generator=draw, device=device) * 6
    numbers = torch.tensor(lengths, dtype=torch.int32, device=device)

    def launch(by: KernelSet, cache: Tensor) -> Tensors:
        places = (last, cache[:, 0], cache[:, 1], slots, None, tables, numbers)
        out = by.prologue_decode(qkv.clone(), norms, angles.cos(), angles.sin(), *places, scale=dim**-0.5)
        return {"result": out, "cache": cache}

    want: Tensors = {}

    def wrong(got: Tensors) -> Iterator[str]:
        want.update(want or launch(twins, data.clone()))
        for name, tensor in want.items():
            yield from far(f"the {name}", got[name].nan_to_num(9.0), tensor.nan_to_num(9.0))

    size = dtype.itemsize
    cost = roofline.prologue_decode(lengths, heads, groups, dim, dim, BLOCK_SIZE, size, has_norms=has_norms)
    what = f"{len(lengths)} x {heads}/{groups} x {dim}{', norms' * has_norms}"
    return Trial(f"prologue_decode of {what}", lambda: launch(kernels, data.clone()), wrong, cost)


@dataclass(frozen=True, slots=True, eq=False)
class FoldedInputs:
    """What decode with its prologue reads beside a cache. The new tokens are the last ones of their sequences."""

    qkv: Tensor  # [S, H + 2 G, D]
    norms: HeadNorms
    cos: Tensor  # [P, D / 2] f32
    sin: Tensor
    positions: Tensor  # [S] i64
    slots: Tensor

    @classmethod
    def drawn(cls, widths: Widths, case: PagedCase, block_size: int, draw: Generator | None) -> FoldedInputs:
        num_rows, (_, width) = len(case.lengths), case.block_tables.shape
        device, dtype, dim = case.q.device, case.q.dtype, widths.head_dim
        own = torch.randn(num_rows, 2 * widths.num_groups, dim, generator=draw, device=device, dtype=dtype)
        angles = torch.rand(width * block_size, dim // 2, generator=draw, device=device) * 6
        last = case.lengths.long() - 1
        blocks = case.block_tables.gather(1, (last // block_size)[:, None])[:, 0].long()
        weights = torch.ones(2, dim, device=device, dtype=dtype)
        return cls(
            qkv=torch.cat([case.q, own], 1),
            norms=HeadNorms(q=weights[0], k=weights[1], eps=EPS),
            cos=angles.cos(),
            sin=angles.sin(),
            positions=last,
            slots=blocks * block_size + last % block_size,
        )


# ---- products -------------------------------------------------------------------------------------------------------


def product_trial(
    kernels: KernelSet,
    name: str,
    form: ProductForm,
    kind: ProductKind,
    size: tuple[int, int, int],
    dtype: torch.dtype,
    draw: Generator,
) -> Trial:
    """With a norm before, unless it is added to a residual, which lies among other numbers that must stay."""
    num_rows, num_outputs, num_inner = size
    halves = 2 if kind == "gated" else 1
    x = _randn(draw, num_rows, num_inner, dtype=dtype)
    weight = _randn(draw, halves * num_outputs, num_inner, dtype=dtype) * num_inner**-0.5
    factors, beside = _randn(draw, num_inner, dtype=dtype), _randn(draw, num_rows, num_outputs + 16, dtype=dtype)
    norm, before = RowNorm(kind="rms", eps=EPS, weight=factors), beside.clone()
    counters = torch.zeros(num_counters(((num_rows, form),), num_outputs), dtype=torch.int32, device=draw.device)
    few = FewRows(weight, None, ((num_rows, form),), counters)

    def launch() -> Tensors:
        counters.zero_()  # as at the begin of a step
        if kind == "add":
            summed = kernels.linear_add(beside[:, 8:-8], x, Linear(weight), few)
            return {"out": summed, "beside": beside}
        multiply: Any = kernels.norm_linear if kind == "plain" else partial(_gated, kernels)
        return {"out": multiply(x, norm, Linear(weight), few)}

    def wrong(got: Tensors) -> Iterator[str]:
        wide = x if kind == "add" else oracle.rms_norm(x, factors, EPS).to(dtype)
        sums = wide.double() @ weight.double().t()
        if kind == "add":
            yield from far("the sum", got["out"], before[:, 8:-8].double() + sums)
            yield from unlike("what is beside the sum", got["beside"][:, :8], before[:, :8])
        else:
            yield from far("the result", got["out"], oracle.gated(sums.to(dtype)) if kind == "gated" else sums)

    num_bytes = dtype.itemsize * (x.numel() + weight.numel() + num_rows * num_outputs)
    cost = LaunchCost(num_bytes, 2 * num_rows * weight.numel())
    return Trial(f"{KINDS[kind]} of {num_rows} x {num_inner} x {num_outputs}, {name}", launch, wrong, cost)


def _gated(kernels: KernelSet, x: Tensor, norm: RowNorm, linear: Linear, few: FewRows) -> Tensor:
    return kernels.gated_linear(x, norm, linear, "silu", few=few)


def _randn(draw: Generator, *dims: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(dims, generator=draw, device=draw.device, dtype=torch.float32).to(dtype)
