"""Products with their norm, activation or residual, from the kernels of layers and the product of a linear.

The twins are in `kernels/triton/products.py`, which takes these too where it leaves a product to the library.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..layout.layer_options import Activation
from ..layout.products import AnyLinear, FewRows, RowNorm
from . import layers


class ComposedProducts:
    """The products of `KernelSet`, each as several calls: bit-equal to calling them by hand. `FewRows` are ignored."""

    def __init__(
        self,
        rms_norm: Callable[[Tensor, Tensor | None, float], Tensor],
        layer_norm: Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor],
        gated: Callable[[Tensor, Activation, float, float], Tensor],
        activated: Callable[[Tensor, Activation, Tensor | None], Tensor],
    ) -> None:
        self._rms_norm, self._layer_norm, self._gated, self._activated = rms_norm, layer_norm, gated, activated

    def norm(self, x: Tensor, norm: RowNorm | None) -> Tensor:
        """The norm of x [T, K]; None = x."""
        if norm is None:
            return x
        if norm.kind == "layer":
            return self._layer_norm(x, norm.weight, norm.bias, norm.eps)
        return self._rms_norm(x, norm.weight, norm.eps)

    def norm_linear(self, x: Tensor, norm: RowNorm | None, linear: AnyLinear, few: FewRows | None = None) -> Tensor:
        """See `KernelSet.norm_linear`."""
        return linear(self.norm(x, norm))

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
        return self._gated(linear.unrounded(self.norm(x, norm)), activation, alpha, limit)

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
        return self._activated(linear.unrounded(self.norm(x, norm)), activation, params)

    def linear_add(self, residual: Tensor, x: Tensor, linear: AnyLinear, few: FewRows | None = None) -> Tensor:
        """See `KernelSet.linear_add`."""
        return linear.add_to(residual, x)


_composed = ComposedProducts(layers.rms_norm, layers.layer_norm, layers.gated, layers.activated)
norm_linear, gated_linear = _composed.norm_linear, _composed.gated_linear
activated_linear, linear_add = _composed.activated_linear, _composed.linear_add
