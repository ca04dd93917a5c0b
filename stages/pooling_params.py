"""Parameters of an embedding, and its last step: truncation and normalization.

This file does not depend on torch. A pooled sequence is computed like any other, chunk by chunk. It ends with its
prompt: its hidden states become a vector where another sequence would get a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..model.pooling import PoolingConfig, Role
from ..model.sentence_files import POOLING_KINDS, PoolingKind
from .errors import Refused, field_text

Floats = NDArray[np.float32]
Side = Literal["left", "right"]
Kind = PoolingKind | Literal["score"]  # score: one number per pair of texts, from a reranker's head
KINDS: tuple[Kind, ...] = (*POOLING_KINDS.values(), "score")

__all__ = ["MAX_INPUTS", "KINDS", "MAX_PAIRS", "Floats", "Kind", "PoolingParams", "Role", "Side", "no_instruction"]

MAX_INPUTS = 2048  # texts per request, as OpenAI's limit
MAX_PAIRS = MAX_INPUTS // 2  # per request; without a cross-encoder each pair is two texts


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How to turn the hidden states of a sequence into one vector."""

    kind: Kind | None = None  # None: the model's
    dimensions: int | None = None  # leading numbers to keep; None: all
    normalize: bool | None = None  # scale to length 1; None: as the model says, and yes if it says nothing
    truncate_prompt_tokens: int | None = None  # tokens of a text to keep; None or -1: as many as the model reads
    truncation_side: Side | None = None  # the side of a text that is cut off; None: the tokenizer's
    prompt_name: str | None = None  # of the model's prompts, put before each text; None: its default
    # set with the model's values, before the sequence is queued:
    num_skipped: int = 0  # first tokens of a mean and such, which are the model's prompt
    cuts_last: bool = False  # truncation follows the scaling; else it precedes it

    @property
    def needs_every_position(self) -> bool:
        """Whether the hidden state of every token is needed.

        Cached or swapped blocks do not hold hidden states.
        """
        return self.kind not in ("last", "score")

    def check(self, model: PoolingConfig) -> None:
        """Raises `Refused` if the model's embeddings cannot be truncated to `dimensions`, or if it lacks the prompt."""
        if self.dimensions is not None and not model.allows(self.dimensions):
            raise Refused(field_text("dimensions", model.describe_dimensions(), str(self.dimensions)))
        if self.prompt_name is not None and self.prompt_name not in model.prompts:
            known = f"must be one of {', '.join(model.prompts)}" if model.prompts else "this model has no prompts"
            raise Refused(field_text("prompt_name", known, repr(self.prompt_name[:64])))

    def complete(self, model: PoolingConfig, num_skipped: int = 0) -> PoolingParams:
        """The params with the model's values for what they leave open."""
        return PoolingParams(
            kind=self.kind or model.kind,
            dimensions=self.dimensions or model.truncate_dim,
            normalize=model.normalizes if self.normalize is None else self.normalize,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
            num_skipped=num_skipped,
            cuts_last=self.dimensions is None and self.normalize is None,
        )

    def finish(self, vector: Floats) -> Floats | None:
        """The embedding [E] of a pooled vector [H]; None if the vector holds NaN or infinity."""
        if not self.cuts_last:
            vector = vector[: self.dimensions]
        if not np.isfinite(vector).all():
            return None
        if self.normalize is not False:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return np.ascontiguousarray(vector[: self.dimensions], np.float32)


def no_instruction() -> Refused:
    """The error of an instruction to a model that reads none."""
    return Refused(
        field_text("instruction", "this model reads none; leave it out, or put it before the query"),
        code="unsupported_parameter",
    )
