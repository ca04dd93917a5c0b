"""What kernels of matrix products take besides tensors: norms of rows, the linear, and its forms of few rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from ..tilings.products import FormsByRows, ProductForm


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowNorm:
    """A norm over the numbers of each row, as `KernelSet.rms_norm` or `layer_norm` computes it."""

    kind: Literal["rms", "layer"]
    eps: float
    weight: Tensor | None  # [K]
    bias: Tensor | None = None  # [K], of a layer norm


class AnyLinear(Protocol):
    """A product with a fixed weight in the form that suits its device: `model/decoder/linear.py`."""

    def __call__(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias`, [M, N] in x's dtype."""

    def unrounded(self, x: Tensor) -> Tensor:
        """The same in the dtype of the sum, if the form has it."""

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual` + the product, rounded once; may overwrite `residual`."""


@dataclass(frozen=True, slots=True, eq=False)
class FewRows:
    """The weight of a product for kernels of few rows, and their forms."""

    weight: Tensor  # [N, K], or [2N, K] with the gate first; contiguous in K
    bias: Tensor | None  # of the weight's rows
    forms: FormsByRows
    counters: Tensor | None = None  # i32, of this product alone, zero at the begin of each step; needed for splits

    def form(self, num_rows: int) -> ProductForm | None:
        """The form for that many rows; None = the library's."""
        for most_rows, form in self.forms:
            if num_rows <= most_rows:
                return None if form.form == "library" else form
        return None


def num_counters(forms: FormsByRows, num_outputs: int) -> int:
    """Counters that a product needs: one for each tile that is cut into splits."""
    return max(
        (
            -(-num_outputs // form.block_n) * -(-most_rows // form.block_m)
            for most_rows, form in forms
            if form.form == "split" and form.num_splits > 1
        ),
        default=0,
    )
