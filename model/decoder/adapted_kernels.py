"""A kernel set whose products add the adapters of a step's tokens."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from ...kernels.kernel_set import Activation, AnyLinear, FewRows, KernelSet, RowNorm
from .lora_slots import LoraSlots

PRODUCTS = ("norm_linear", "gated_linear", "activated_linear", "linear_add")


def with_slots(kernels: KernelSet, slots: LoraSlots) -> KernelSet:
    """The kernels, with the adapters of `slots` in the products of their linears.

    A step without adapters makes the calls that it makes without `slots`.
    """
    return cast(KernelSet, AdaptedKernels(kernels, slots))


class AdaptedKernels:
    """See `with_slots`. Members other than products are those of `kernels`.

    A norm is a launch of its own here, as the product with A reads its result too. A gated product adds its updates in
    the launch that gates.
    """

    def __init__(self, kernels: KernelSet, slots: LoraSlots) -> None:
        self._kernels, self._slots, self._lora = kernels, slots, slots.kernels
        for name in dir(KernelSet):
            if not name.startswith("_") and name not in PRODUCTS:
                setattr(self, name, getattr(kernels, name))

    def norm_linear(self, x: Tensor, norm: RowNorm | None, linear: AnyLinear, few: FewRows | None = None) -> Tensor:
        """See `KernelSet.norm_linear`."""
        found = self._slots.of(linear)
        if found is None:
            return self._kernels.norm_linear(x, norm, linear, few)
        x = self._normed(x, norm)
        sums = self._lora.lora_shrink(x, *found)
        product = self._kernels.norm_linear(x, None, linear, few)
        self._lora.lora_add(product, sums, *found)
        return product

    def gated_linear(
        self,
        x: Tensor,
        norm: RowNorm | None,
        linear: AnyLinear,
        activation: Activation,
        alpha: float = 1.702,
        limit: float = 7.0,
        few: FewRows | None = None,
    ) -> Tensor:
        """See `KernelSet.gated_linear`."""
        found = self._slots.of(linear)
        if found is None:
            return self._kernels.gated_linear(x, norm, linear, activation, alpha, limit, few)
        x = self._normed(x, norm)
        sums = self._lora.lora_shrink(x, *found)
        product = self._kernels.norm_linear(x, None, linear, _unsplit(few, len(x)))
        return self._lora.lora_gated(product, sums, *found, activation, alpha, limit)

    def activated_linear(
        self,
        x: Tensor,
        norm: RowNorm | None,
        linear: AnyLinear,
        activation: Activation,
        params: Tensor | None = None,
        few: FewRows | None = None,
    ) -> Tensor:
        """See `KernelSet.activated_linear`."""
        if self._slots.of(linear) is None:
            return self._kernels.activated_linear(x, norm, linear, activation, params, few)
        return self._kernels.activated(self.norm_linear(x, norm, linear, few), activation, params)

    def linear_add(self, residual: Tensor, x: Tensor, linear: AnyLinear, few: FewRows | None = None) -> Tensor:
        """See `KernelSet.linear_add`."""
        found = self._slots.of(linear)
        if found is None:
            return self._kernels.linear_add(residual, x, linear, few)
        sums = self._lora.lora_shrink(x, *found)
        total = self._kernels.linear_add(residual, x, linear, few)
        self._lora.lora_add(total, sums, *found)
        return total

    def _normed(self, x: Tensor, norm: RowNorm | None) -> Tensor:
        if norm is None:
            return x
        if norm.kind == "layer":
            return self._kernels.layer_norm(x, norm.weight, norm.bias, norm.eps)
        return self._kernels.rms_norm(x, norm.weight, norm.eps)


def _unsplit(few: FewRows | None, num_rows: int) -> FewRows | None:
    """The form of a gated product for gate and up as they are; None where it has counters for half as many tiles."""
    form = None if few is None else few.form(num_rows)
    return few if form is not None and form.num_splits == 1 else None
