"""Finds models whose numbers depend on a token's row in a step: in a batch that row is not the token's position.

Llama 4 scales queries by a count of rows, in steps of thousands, which no short prompt shows. So `torch.arange` over
the rows of a step gives larger numbers here, and nothing may change.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .attention_interface import AttentionCall, handled_by
from .errors import UnservableError
from .transformers_decoder import TransformersModel, nothing_seen

NUM_ROWS = 23  # of the step; a number that is no other size of a model


def check_rows(loaded: TransformersModel, prompt: Tensor, max_model_len: int) -> None:
    """Raises UnservableError if numbers of the first tokens of a prompt depend on their rows."""
    here, elsewhere = (_numbers(loaded, prompt[:NUM_ROWS], shift) for shift in (0, max(0, max_model_len - NUM_ROWS)))
    if any(not one.eq(other).logical_or(one.isnan()).all() for one, other in zip(here, elsewhere, strict=True)):
        raise UnservableError("its numbers depend on a token's row in a step, not only on its position")


@torch.inference_mode()
def _numbers(loaded: TransformersModel, prompt: Tensor, shift: int) -> list[Tensor]:
    """Queries, keys and values of each attention call, and the hidden states, of a step with shifted rows."""
    numbers: list[Tensor] = []

    def note(call: AttentionCall) -> Tensor:
        numbers.extend((call.q, call.k, call.v))
        return nothing_seen(call)

    positions = torch.tensor(list(range(len(prompt))), device=loaded.device)
    with cast(Any, _ShiftedRows)(shift), handled_by(note):
        numbers.append(loaded.body.hidden_of_step(prompt, positions))
    return numbers


class _ShiftedRows(TorchFunctionMode):
    """Within this context `torch.arange` over the rows of a step gives larger numbers."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self._shift = shift

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made + self._shift if func is torch.arange and made.numel() == NUM_ROWS else made
