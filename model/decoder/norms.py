"""The norms of rows, with their weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ...kernels.kernel_set import KernelSet
from ..spec import NormSpec


@dataclass(frozen=True, slots=True, eq=False)
class NormWeights:
    """A norm. In f32, beside weights of another dtype, if it is rounded at its end only."""

    spec: NormSpec
    weight: Tensor | None  # [size]
    bias: Tensor | None

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held in memory."""
        yield from (tensor for tensor in (self.weight, self.bias) if tensor is not None)


def normed(x: Tensor, norm: NormWeights | None, kernels: KernelSet) -> Tensor:
    """A norm over the rows of x [T, D], or of its heads [T, H, D]; None = x."""
    if norm is None:
        return x
    if norm.spec.kind == "layer":
        return kernels.layer_norm(x, norm.weight, norm.bias, norm.spec.eps)
    return kernels.rms_norm(x, norm.weight, norm.spec.eps)
