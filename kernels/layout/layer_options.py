"""What the kernels of a layer can be told besides tensors: the norm of heads, activations by name, how to route."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu", "swiglu_clamped"]  # as in `model/spec.py`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadNorms:
    """The norm of queries and keys, each head by itself or all heads of a token as one row.

    A weight is [D], or [H, D] for queries and [G, D] for keys: the weights of a row, or of each head. It is of the
    projection's type (an RMS norm then rounds before it, as in `KernelSet.rms_norm`) or f32. None = no weight. A bias
    has the shape of its weight, and is added after it; only LayerNorm may have one.
    """

    q: Tensor | None
    k: Tensor | None
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    is_over_row: bool = False
    is_after_rope: bool = False
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None


class RoutingRule(Protocol):
    """How scores become the experts of a token: `RouterSpec` of `model/spec.py`, whose comments say what each means."""

    @property
    def score(self) -> Literal["softmax", "sigmoid"]: ...
    @property
    def when(self) -> Literal["before_top_k", "after_top_k"]: ...
    @property
    def norm_top_k(self) -> bool: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def norm_min(self) -> float: ...
    @property
    def scale(self) -> float: ...
    @property
    def groups(self) -> int: ...
    @property
    def groups_kept(self) -> int: ...
    @property
    def group_score(self) -> Literal["max", "top2"]: ...
