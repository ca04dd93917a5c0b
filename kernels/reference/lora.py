"""LoRA in PyTorch: adds each adapter's update to its rows of a product. The twin of native and Triton kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LoraSlice:
    """Outputs of a linear that an adapter changes: y[row_start : row_start + N] += b @ (a @ x)."""

    row_start: int
    a: Tensor  # [r, K] f32
    b: Tensor  # [N, r] f32, with the scale in it


def add_lora(product: Tensor, x: Tensor, rows: Tensor, slices: Iterable[LoraSlice]) -> None:
    """Adds one adapter's update to its rows of a product, in place.

    T tokens of the step, t of the adapter, K inputs, M outputs.

    product  [T, M]  f32
    x        [T, K]  any float: what the product was made of
    rows     [t]     i64, the tokens of the adapter, each once

    Sums in f32.
    """
    taken = x.index_select(0, rows).float()  # [t, K]
    for one in slices:
        update = (taken @ one.a.t()) @ one.b.t()  # [t, N]
        product[:, one.row_start : one.row_start + one.b.shape[0]].index_add_(0, rows, update)
