"""What the forward pass of a step leaves for its sampling."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...runtime.message import message
from ..messages import Bools, StepTokens
from .arrays import Array
from .scored_prompts import LogitsWithPrompts


@message
class TokenChoice:
    """The tokens chosen for n rows."""

    token_ids: NDArray[np.int64]  # [n] 0 where the row is broken
    is_broken: Bools  # [n] no finite maximum
    scored: Any = None  # from which `tell` computes log-probabilities; None: not requested


class UnfinishedStep(Protocol):
    """A step that an asynchronous device has been given and has not finished."""

    def wait(self) -> StepTokens:
        """Blocks until the device has finished it, and returns its tokens. Raises its error."""


# Logits [L, V]; with the hidden states of prompts that are scored; tokens that the model chose; or a step that goes on.
# The sampler of the same backend reads it, on the device thread, before the next forward pass.
StepResult: TypeAlias = Array | LogitsWithPrompts | TokenChoice | UnfinishedStep
