"""The part of a model between the token ids and its output layer, run alone or left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention_interface import Handler, handled_by
from .errors import UnservableError


class ModelBody:
    """The module whose hidden states the output layer reads.

    The model runs as a whole, so that whatever it does to logits happens. Its output layer gets only some rows, or
    hidden states of an earlier step in place of the module's.
    """

    def __init__(self, model: PreTrainedModel, handler: Handler) -> None:
        """Finds the module in a run of `handler`."""
        self.model = model
        self._rows: Tensor | None = None
        self._given: Tensor | None = None
        self._output_type: type[Any] | None = None
        self._hidden: Tensor | None = None  # [T, hidden] of the last step
        module = _outermost(model, handler)
        self._forward = module.forward
        module.forward = self._run

    def logits_of_step(self, token_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Logits [L, V] of the rows [L] of a step with tokens and positions [T]."""
        self._rows, self._given = rows, None
        return self._logits(token_ids, positions)

    def hidden_of_step(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [T, hidden] of a step with tokens and positions [T], as the output layer reads them."""
        self.logits_of_step(token_ids, positions, torch.zeros_like(token_ids[:1]))
        assert self._hidden is not None
        return self._hidden

    def logits_of_hidden(self, hidden: Tensor) -> Tensor:
        """Logits [L, V] of hidden states [L, hidden] of an earlier step."""
        self._given = hidden
        zeros = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        return self._logits(zeros, zeros)

    def _logits(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        output = self.model(input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
        logits: Tensor = output.logits[0]
        return logits

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the module's `forward`."""
        if self._given is not None:
            assert self._output_type is not None, "no step has run yet"
            return self._output_type(last_hidden_state=self._given.unsqueeze(0))
        output = self._forward(*args, **kwargs)
        self._output_type, self._hidden = type(output), output.last_hidden_state[0]
        if self._rows is not None:
            output.last_hidden_state = self._hidden.index_select(0, self._rows).unsqueeze(0)
        return output


def _outermost(model: PreTrainedModel, handler: Handler) -> nn.Module:
    """The module that the model calls for hidden states, however its class names it."""
    called: list[nn.Module] = []
    parts = [model.base_model, *model.children()]
    parts += [part for part in (getattr(model.base_model, "decoder", None),) if isinstance(part, nn.Module)]

    def note(module: nn.Module, args: object, output: Any) -> None:
        if isinstance(getattr(output, "last_hidden_state", None), Tensor):
            called.append(module)

    hooks = [part.register_forward_hook(note) for part in parts if part is not model]
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode(), handled_by(handler):
            model(input_ids=ids, position_ids=torch.arange(2, device=model.device).unsqueeze(0), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if not called:
        raise UnservableError(f"no part of {type(model).__name__} gives the hidden states of its output layer")
    return called[-1]
