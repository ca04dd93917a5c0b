"""The attention that transformers' modules call: registered under one name, and computed by the step that runs.

A module calls it with the queries, keys and values of a step's new tokens, as one row. Which sequences they are of, and
where the cache is, the step's handler knows. It travels in a context variable, as a model may drop keyword arguments.

Shapes: T new tokens, H query heads, G key/value heads, D size of queries and keys, E size of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from .errors import UnservableError

IMPLEMENTATION = "millrace"  # the name in transformers' tables

# Keyword arguments that change nothing here: windows are those of the cache classes, and all tokens are new.
WITHOUT_EFFECT = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "dropout",
    "max_length_k",
    "max_length_q",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "sliding_window",
    "use_cache",
}


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One call of a module's attention. A module may make several in a step."""

    module: nn.Module
    q: Tensor  # [T, H, D]
    k: Tensor  # [T, G, D]
    v: Tensor  # [T, G, E]
    scale: float
    soft_cap: float | None
    sinks: Tensor | None  # [H]


Handler = Callable[[AttentionCall], Tensor]  # returns [T, H, E]

_handler: ContextVar[Handler | None] = ContextVar("handler", default=None)


@contextmanager
def handled_by(handler: Handler) -> Iterator[None]:
    """Within this context `handler` computes the attention of modules."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: query [1, H, T, D], key and value [1, G, T, D and E]; returns [1, T, H, E]."""
    handler = _handler.get()
    assert handler is not None, "a model runs outside of `handled_by`"
    name = type(module).__name__
    if attention_mask is not None:
        raise UnservableError(f"its {name} makes a mask of its own")
    if rest.pop("is_causal", None) is False or getattr(module, "is_causal", True) is False:
        raise UnservableError(f"its {name} attends in both directions")
    unknown = sorted(key for key, value in rest.items() if value is not None and key not in WITHOUT_EFFECT)
    if unknown:
        raise UnservableError(f"its {name} attends with {', '.join(unknown)}, which the paged cache has no place for")
    if query.shape[0] != 1 or key.shape[2] != query.shape[2] or query.shape[1] % key.shape[1]:
        shapes = f"queries {list(query.shape)} and keys {list(key.shape)}"
        raise UnservableError(f"its {name} does not attend from each token to those before it ({shapes})")
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return handler(AttentionCall(module, q, k, v, scale, softcap, s_aux)).unsqueeze(0), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """No mask is made: the handler knows what each token sees."""


AttentionInterface.register(IMPLEMENTATION, _attend)
AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
