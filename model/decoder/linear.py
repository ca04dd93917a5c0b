"""Matrix products with a fixed weight, in the form that is fastest on the device the weight is on.

On a CPU the form depends on the instruction set. Measured on 2 cores, all linears of a 135M-parameter model, bfloat16,
without bfloat16 dot products (AVX-512 F/BW/VL): 1 row 24 ms plain, 26 ms packed; 32 rows 232 ms plain, 191 ms packed,
100 ms widened; 256 rows 1,350 ms plain, 490 ms widened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

EVEN_ROWS = 64


class Linear:
    """x @ weight.T + bias for x [M, K] and weight [N, K]; the result is [M, N] in x's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._columns = weight.t()  # [K, N], a view made once: it would cost two calls in each product
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self._columns) if self._bias is None else torch.addmm(self._bias, x, self._columns)

    def unrounded(self, x: Tensor) -> Tensor:
        """The product in the dtype it was summed in, where the form has it: float32 or x's dtype."""
        return self(x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + the product, rounded once. May write to `residual`: go on with what is returned."""
        if self._bias is not None:
            residual = residual.add_(self._bias)
        return residual.addmm_(x, self._columns)

    def tensors(self) -> Iterator[Tensor]:
        """All that is held in memory for it."""
        yield self._columns
        if self._bias is not None:
            yield self._bias


class PackedLinear(Linear):
    """The weight reordered once for oneDNN, the plain one dropped. For a CPU, float32 or native bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self._bias, "add")
        return total

    def tensors(self) -> Iterator[Tensor]:
        yield self._packed
        if self._bias is not None:
            yield self._bias


class WidenedLinear(Linear):
    """A half-precision weight for CPUs that lack half-precision dot products.

    One row is bound by memory, so it reads the half-size weight; more rows are bound by arithmetic, so they use a
    packed float32 copy. Either way sums are in float32 and the result is rounded once.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self._wide = PackedLinear(weight.float(), None if bias is None else bias.float())

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) if x.shape[0] == 1 else self._wide(x.float()).to(x.dtype)

    def unrounded(self, x: Tensor) -> Tensor:
        return super().__call__(x) if x.shape[0] == 1 else self._wide(x.float())

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return super().add_to(residual, x) if x.shape[0] == 1 else residual.add_(self._wide(x.float()))

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        yield from self._wide.tensors()


class EvenLinear(Linear):
    """Multiplies EVEN_ROWS rows at a time, zeros behind the last, whatever their number.

    A library chooses how to multiply by the sizes, so with others in the batch a row may be summed in another order.
    Products of one size are all done in one way; that this gives a row the same bits wherever it stands among the
    others holds for products that are cut into whole tiles, is no library's promise, and is tested where it runs.
    """

    def __call__(self, x: Tensor) -> Tensor:
        return _evenly(super().__call__, x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return _evenly(super().add_to, residual, x)


def _evenly(product: Callable[..., Tensor], *arrays: Tensor) -> Tensor:
    """`product` of EVEN_ROWS rows of each of `arrays` [M, ...] at a time."""
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
    """The class to hold a model's linears in, `num_weights` elements in all.

    Widening keeps 4 more bytes an element, so it is chosen only where that is at most a quarter of
    `free_bytes`, if that is known.
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
