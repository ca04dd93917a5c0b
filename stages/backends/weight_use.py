"""How many bits the weights take, and what of them a step reads for each token."""

from __future__ import annotations

import math

from ...model.checkpoint.tensor_shapes import expected_shapes
from ...model.spec import DecoderSpec
from ..outputs import WeightUse


def weight_use(shape: DecoderSpec, num_bytes: int, embedding_bytes: float) -> WeightUse:
    """Of a decoder whose tensors take `num_bytes`, of them `embedding_bytes` the token embedding.

    Of an embedding that is not the output layer too, a token reads one row.
    """
    num_weights = sum(map(math.prod, expected_shapes(shape).values()))
    is_read = shape.head.exists and shape.head.is_tied
    read = num_bytes if is_read else num_bytes - embedding_bytes * (1 - 1 / shape.vocab_size)
    return WeightUse(num_weights, num_bytes, int(read))
