"""How many bits the weights take, and what of them a step reads for each token."""

from __future__ import annotations

import math

from ...model.checkpoint.tensor_shapes import expected_shapes
from ...model.spec import DecoderSpec, MoeSpec
from ..outputs import WeightUse


def weight_use(shape: DecoderSpec, num_bytes: int, embedding_bytes: float, idle_bytes: float = 0.0) -> WeightUse:
    """Of a decoder whose tensors take `num_bytes`, of them `embedding_bytes` the token embedding.

    `idle_bytes`: of the experts that a token does not go to. Of an embedding that is not the output layer too, a token
    reads one row.
    """
    num_weights = sum(map(math.prod, expected_shapes(shape).values()))
    is_read = shape.head.exists and shape.head.is_tied
    read = num_bytes if is_read else num_bytes - embedding_bytes * (1 - 1 / shape.vocab_size)
    return WeightUse(num_weights, num_bytes, int(read - idle_bytes))


def num_idle_weights(shape: DecoderSpec) -> int:
    """Weights of the experts that a token does not go to, in all layers."""
    idle = 0
    for moe in (layer.feed for layer in shape.layers):
        if isinstance(moe, MoeSpec):
            inner, num_matrices = moe.expert.intermediate_size, 3 if moe.expert.is_gated else 2
            biases = (num_matrices - 1) * inner + shape.hidden_size if moe.expert.has_bias else 0
            idle += (moe.num_experts - moe.top_k) * (num_matrices * inner * shape.hidden_size + biases)
    return idle
