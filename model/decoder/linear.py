"""Matrix products with a fixed weight, in the form that is fastest on the weight's device.

On a CPU the form depends on the instruction set: `linear_form` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

EVEN_ROWS = 64  # rows of each product of `EvenLinear`


class Linear:
    """x @ weight.T + bias for x [M, K] and weight [N, K]; the result is [M, N] of `dtype`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._columns = weight.t()  # [K, N], a view made once, as making it takes two calls
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self._columns) if self._bias is None else torch.addmm(self._bias, x, self._columns)

    def unrounded(self, x: Tensor) -> Tensor:
        """The product in the dtype of the sum if the form has it: float32 or x's dtype."""
        return self(x)

    def write(self, x: Tensor, out: Tensor) -> None:
        """Writes the product to `out` [T, N], of x's dtype or wider; without a copy where the form can."""
        if type(self) is not Linear or out.dtype != x.dtype:
            out.copy_(self.unrounded(x))
        elif self._bias is None:
            torch.mm(x, self._columns, out=out)
        else:
            torch.addmm(self._bias, x, self._columns, out=out)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual` + the product, rounded once. May overwrite `residual`, so use the result instead."""
        if self._bias is not None:
            residual = residual.add_(self._bias)
        return residual.addmm_(x, self._columns)

    @property
    def weight(self) -> Tensor:
        """The weight [N, K] as it was given, a view."""
        return self._columns.t()

    @property
    def dtype(self) -> torch.dtype:
        """Of its products, rounded: the weight's, also where x is wider."""
        return self._columns.dtype

    @property
    def num_outputs(self) -> int:
        """N."""
        return self._columns.shape[1]

    @property
    def num_inner(self) -> int:
        """K."""
        return self._columns.shape[0]

    @property
    def bias(self) -> Tensor | None:
        """The bias [N]."""
        return self._bias

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held in memory."""
        yield self._columns
        if self._bias is not None:
            yield self._bias


class PackedLinear(Linear):
    """Holds the weight only in oneDNN's order. For a CPU, float32 or native bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias
        self._dtype = weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self._bias, "add")
        return total

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def tensors(self) -> Iterator[Tensor]:
        yield self._packed
        if self._bias is not None:
            yield self._bias


class WidenedLinear(Linear):
    """A half-precision weight for CPUs that lack half-precision dot products.

    A product of one row is bound by memory, so it reads the half-precision weight. Products of more rows are bound by
    arithmetic, so they use a packed float32 copy. Both sum in float32 and round the result once, to the weight's dtype
    also where x [M, K] is an unrounded product.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self._wide = PackedLinear(weight.float(), None if bias is None else bias.float())

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) if x.shape[0] == 1 else self._wide(x.float()).to(self.dtype)

    def unrounded(self, x: Tensor) -> Tensor:
        return super().__call__(x) if x.shape[0] == 1 else self._wide(x.float())

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return super().add_to(residual, x) if x.shape[0] == 1 else residual.add_(self._wide(x.float()))

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        yield from self._wide.tensors()


class EvenLinear(Linear):
    """Multiplies EVEN_ROWS rows at a time, padded with zeros, so a row's result does not depend on the batch size.

    A library chooses its algorithm by the sizes, so in a batch of another size a row may be summed in another order.
    Products of one size use one algorithm. NOTE: no library promises that a row's position does not change its bits;
    this holds for products cut into whole tiles, and a test checks it on the machine.
    """

    def __call__(self, x: Tensor) -> Tensor:
        return _evenly(super().__call__, x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return _evenly(super().add_to, residual, x)


def held(linear: Linear | None) -> Linear:
    """A linear that a layer's spec says is there."""
    assert linear is not None, "the layer's spec has no such part"
    return linear


def _evenly(product: Callable[..., Tensor], *arrays: Tensor) -> Tensor:
    """Applies `product` to EVEN_ROWS rows of each of `arrays` [M, ...] at a time."""
    num_rows = len(arrays[0])
    missing = -num_rows % EVEN_ROWS
    whole = [pad(array, (0, 0, 0, missing)) if missing else array for array in arrays]
    pieces = [product(*each) for each in zip(*(torch.split(array, EVEN_ROWS) for array in whole), strict=True)]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[:num_rows]


def linear_form(
    device: torch.device,
    dtype: torch.dtype,
    num_weights: int,
    free_bytes: int | None = None,
    *,
    is_batch_invariant: bool = False,
) -> Callable[..., Linear]:
    """The class for a model's linears, which have `num_weights` elements in total.

    `WidenedLinear` takes 4 more bytes an element, so it is chosen only if that is at most a quarter of `free_bytes`;
    None = no limit.
    """
    if is_batch_invariant:
        return EvenLinear
    if device.type != "cpu" or not _can_pack():
        return Linear
    if dtype == torch.float32 or (dtype == torch.bfloat16 and _has_bfloat16_dot()):
        return PackedLinear
    return WidenedLinear if free_bytes is None or 4 * num_weights <= free_bytes // 4 else Linear


def _can_pack() -> bool:
    try:
        PackedLinear(torch.zeros(2, 2))(torch.zeros(1, 2))
    except (RuntimeError, AttributeError):  # a build of torch without these operators
        return False
    return True


def _has_bfloat16_dot() -> bool:
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in names)
