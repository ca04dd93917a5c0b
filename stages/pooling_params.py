"""What a client may ask of an embedding, and the last step to it: cutting and normalising. No torch here.

A pooled sequence is computed like any other, chunk by chunk, and ends with its prompt: a vector is made of its hidden
states in place of a token of its logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..model.pooling import PoolingConfig, PoolingKind
from .errors import Refused

Floats = NDArray[np.float32]
Kind = PoolingKind | Literal["score"]  # score: one number for a pair of texts, from a cross-encoder's own head

MAX_INPUTS = 2048  # texts of one request, as OpenAI's
MAX_PAIRS = MAX_INPUTS // 2  # of one request: without a cross-encoder each is two texts


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How to make one vector of a sequence's hidden states."""

    kind: Kind | None = None  # None: the model's own
    dimensions: int | None = None  # numbers to keep, the first ones; None: all
    normalize: bool = True  # to length 1, after cutting

    @property
    def needs_every_position(self) -> bool:
        """Whether hidden states are needed that a prefix from the cache, or a copy from the host, does not bring."""
        return self.kind != "last"

    def check(self, model: PoolingConfig) -> None:
        """Raises `Refused` for a length that the model's embeddings can not be cut to."""
        if self.dimensions is not None and not model.allows(self.dimensions):
            message = f"dimensions = {self.dimensions}: {model.describe_dimensions()}"
            raise Refused(message, param="dimensions")

    def finish(self, vector: Floats) -> Floats | None:
        """The embedding of a pooled vector [H], [E]; None if that holds something that is no number."""
        if self.dimensions is not None:
            vector = vector[: self.dimensions]
        if not np.isfinite(vector).all():
            return None
        if self.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return np.ascontiguousarray(vector, np.float32)
