"""What layers get of each token besides the residual: see `PerLayerInputs` of `spec.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.kernel_set import KernelSet
from ..spec import DecoderSpec
from .norms import normed
from .weights import DecoderWeights, LayerInputWeights

HALF_ROOT = 2.0**-0.5  # of the sum of table and projection


class LayerInputs:
    """The inputs of all layers, of models that have them."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, kernels: KernelSet) -> None:
        self.spec, self.weights, self.kernels = spec.embedding.per_layer, weights.per_layer, kernels
        if self.spec is not None:
            self._scale = float(torch.tensor(self.spec.scale, dtype=weights.embedding.dtype))

    def of(self, residual: Tensor, ids: Tensor) -> Tensor | None:
        """The inputs [T, layers, width] of tokens `ids` [T], with their first residual [T, hidden]; None: none."""
        if self.spec is None or self.weights is None:
            return None
        table = self.weights.table.index_select(0, ids) * self._scale
        projected = self.weights.projection(residual) * self.spec.projection_scale
        shape = (len(ids), -1, self.spec.width)
        projected = normed(projected.view(shape), self.weights.norm, self.kernels)
        return (projected + table.view(shape)) * HALF_ROOT

    def part(self, x: Tensor, layer_input: Tensor, weights: LayerInputWeights) -> Tensor:
        """What a layer adds to x [T, hidden] of its input [T, width]; as x."""
        assert self.spec is not None
        inner = self.kernels.activated_linear(x, None, weights.gate, self.spec.activation) * layer_input
        return normed(weights.up(inner), weights.norm, self.kernels)
