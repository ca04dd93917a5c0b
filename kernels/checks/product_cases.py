"""The launches of products of few rows that the checks compile: the predicted forms at real sizes.

With a memory that takes no time, so that all numbers of rows have a form, which a table may hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from ..layout.layer_options import Activation
from ..layout.products import FewRows, RowNorm, num_counters
from ..tilings.predicted import predicted_forms
from ..tilings.products import ProductKind
from ..triton import products
from .compile_cases import NUM_PROCESSORS, CompileCase

SIZES: dict[str, tuple[int, int, ProductKind]] = {  # results of a row, K, and kind: of Qwen3-0.6B and Llama-3.1-8B
    "0.6B qkv": (4096, 1024, "plain"),
    "0.6B output": (1024, 2048, "add"),
    "0.6B gate_up": (3072, 1024, "gated"),
    "0.6B down": (1024, 3072, "add"),
    "8B qkv": (6144, 4096, "plain"),
    "8B output": (4096, 4096, "add"),
    "8B gate_up": (14_336, 4096, "gated"),
    "8B down": (4096, 14_336, "add"),
}
ROWS = (1, 4, 16, 64)


def product_cases(names: Sequence[str] = tuple(SIZES), rows: Sequence[int] = ROWS) -> list[CompileCase]:
    """Each product for each number of rows, and the options that those lack: biases, other norms and activations."""
    cases = [_case(f"{name} {count}", *SIZES[name], count) for name in names for count in rows]
    for count in rows:
        cases.append(_case(f"biases {count}", 1024, 2048, "add", count, has_bias=True))
        cases.append(
            _case(f"gelu {count}", 3072, 1024, "gated", count, has_bias=True, activation="gelu", norm_kind="layer")
        )
        cases.append(_case(f"xielu {count}", 3072, 1040, "activated", count, activation="xielu"))
    return cases


def _case(name: str, *size: Any, **options: Any) -> CompileCase:
    return CompileCase(f"product {name}", partial(_launch, *size, **options))


def _launch(
    num_outputs: int,
    num_inner: int,
    kind: ProductKind,
    num_rows: int,
    *,
    has_bias: bool = False,
    activation: Activation = "silu",
    norm_kind: Any = "rms",
) -> Tensor:
    forms = predicted_forms(num_outputs, num_inner, kind, "bfloat16", NUM_PROCESSORS, bytes_per_s=inf)
    weight = _meta(num_outputs * (2 if kind == "gated" else 1), num_inner)
    counters = _meta(max(1, num_counters(forms, num_outputs)), dtype=torch.int32)
    few = FewRows(weight, _meta(len(weight)) if has_bias else None, forms, counters)
    norm = RowNorm(kind=norm_kind, eps=1e-6, weight=_meta(num_inner), bias=_meta(num_inner) if has_bias else None)
    x, linear = _meta(num_rows, num_inner), _Library()
    if kind == "add":
        return products.linear_add(_meta(num_rows, num_outputs), x, linear, few)
    if kind == "gated":
        return products.gated_linear(x, norm, linear, activation, few=few)
    if kind == "activated":
        return products.activated_linear(x, norm, linear, activation, _meta(2, dtype=torch.float32), few)
    return products.norm_linear(x, norm, linear, few)


class _Library:
    """A linear that no case takes: each has a form."""

    def __call__(self, x: Tensor) -> Tensor:
        raise AssertionError("a case without a form")

    unrounded = __call__

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self(x)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
