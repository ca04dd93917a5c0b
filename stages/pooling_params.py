"""Parameters of an embedding, and its last step: truncation and normalization.

This file does not depend on torch. A pooled sequence is computed like any other, chunk by chunk. It ends with its
prompt: its hidden states become a vector where another sequence would get a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..model.pooling import PoolingConfig, PoolingKind
from .errors import Refused

Floats = NDArray[np.float32]
Kind = PoolingKind | Literal["score"]  # score: one number per pair of texts, from a cross-encoder's head

MAX_INPUTS = 2048  # texts per request, as OpenAI's limit
MAX_PAIRS = MAX_INPUTS // 2  # per request; without a cross-encoder each pair is two texts


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How to turn the hidden states of a sequence into one vector."""

    kind: Kind | None = None  # None: the model's
    dimensions: int | None = None  # leading numbers to keep; None: all
    normalize: bool = True  # scale to length 1, after truncation

    @property
    def needs_every_position(self) -> bool:
        """Whether the hidden state of every token is needed.

        Cached or swapped blocks do not hold hidden states.
        """
        return self.kind != "last"

    def check(self, model: PoolingConfig) -> None:
        """Raises `Refused` if the model's embeddings cannot be truncated to `dimensions`."""
        if self.dimensions is not None and not model.allows(self.dimensions):
            message = f"dimensions = {self.dimensions}: {model.describe_dimensions()}"
            raise Refused(message, param="dimensions")

    def finish(self, vector: Floats) -> Floats | None:
        """The embedding [E] of a pooled vector [H]; None if the vector holds NaN or infinity."""
        if self.dimensions is not None:
            vector = vector[: self.dimensions]
        if not np.isfinite(vector).all():
            return None
        if self.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return np.ascontiguousarray(vector, np.float32)
