"""What kernels take of a layer's experts: how tokens are routed, the networks, and the lists of pairs by expert.

A *pair* is a token and one of its experts: pair t * k + r is the expert of rank r of token t. T tokens, E experts, k
experts a token goes to, P = T * k pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..tilings.tables import Tilings
from .layer_options import Activation, RoutingRule
from .products import AnyLinear

TILE = 3  # numbers of a tile: expert, first place in the order of pairs, rows


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExpertStack:
    """The weights of a layer's experts in one tensor each, for kernels that take an expert by its number."""

    gate_up: Tensor  # [E, 2F, K], gate first; [E, F, K] without a gate
    gate_up_bias: Tensor | None  # [E, 2F]
    down: Tensor  # [E, K, F]
    down_bias: Tensor | None  # [E, K]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RoutedExperts:
    """The experts of a layer, and how tokens get to them.

    `each` are (gate_up, down) of every expert; `stack` the same weights for Triton, which are not there for others.
    """

    rule: RoutingRule
    top_k: int
    choice_bias: Tensor | None = None  # [E] f32, see `route`
    scales: Tensor | None = None  # [E] f32: multiply the weights of experts, at last
    is_gated: bool = True
    activation: Activation = "silu"  # not xielu
    alpha: float = 1.702
    limit: float = 7.0
    each: Sequence[tuple[AnyLinear, AnyLinear]] = ()
    stack: ExpertStack | None = None
    is_batch_invariant: bool = False  # products are cut the same for any number of tokens
    tilings: Tilings | None = None  # measured options of the card


def most_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """Tiles of at most `tile_rows` pairs of one expert that any routing makes at most."""
    num_active = min(num_experts, num_pairs)
    return min(num_pairs, (num_pairs + num_active * (tile_rows - 1)) // tile_rows)
