"""What kernels take of a layer's experts: how tokens are routed, the networks, and the lists of pairs by expert.

A *pair* is a token and one of its experts: pair t * k + r is the expert of rank r of token t. T tokens, E experts, k
experts a token goes to, P = T * k pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tilings.tables import Tilings
from .layer_options import Activation, RoutingRule
from .products import AnyLinear

TILE = 3  # numbers of a tile: expert, first place in the order of pairs, rows


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CodedMatrices:
    """The matrices [E, N, K] of a layer's experts in the codes of their file: see `grouped_codes.py`.

    The number in column j, of group g = j // group, is (table[code] - zero - zeros[g]) * scales[g] + offsets[g].
    """

    codes: Tensor  # u8: [E, N, K / 2], two codes of 4 bits a byte, the even column's in the low half; else [E, N, K]
    scales: Tensor  # [E, N, G] f16, bf16 or f32
    zeros: Tensor | None  # [E, N, G] u8
    offsets: Tensor | None  # [E, N, G] f32
    table: Tensor | None  # f32, by code; None: a code stands for itself
    zero: float  # of all codes
    group: int  # columns that share a scale
    num_columns: int  # K
    is_packed: bool  # two codes a byte

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, N and K."""
        return (*self.codes.shape[:2], self.num_columns)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held in memory."""
        yield from (self.codes, self.scales)
        yield from (part for part in (self.zeros, self.offsets, self.table) if part is not None)

    def numbers(self) -> Tensor:
        """[E, N, K] f32."""
        codes = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(2) if self.is_packed else self.codes
        numbers = (codes.float() if self.table is None else self.table[codes.long()]) - self.zero
        by_group = (self.zeros, self.scales, self.offsets)
        zeros, scales, offsets = (
            None if part is None else part.float().repeat_interleave(self.group, -1)[..., : self.num_columns]
            for part in by_group
        )
        assert scales is not None
        numbers = (numbers if zeros is None else numbers - zeros) * scales
        return numbers if offsets is None else numbers + offsets


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExpertStack:
    """The weights of a layer's experts in one tensor each, for kernels that take an expert by its number."""

    gate_up: Tensor | CodedMatrices  # [E, 2F, K], gate first; [E, F, K] without a gate
    gate_up_bias: Tensor | None  # [E, 2F]
    down: Tensor | CodedMatrices  # [E, K, F]
    down_bias: Tensor | None  # [E, K]

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held in memory."""
        for part in (self.gate_up, self.gate_up_bias, self.down, self.down_bias):
            if isinstance(part, CodedMatrices):
                yield from part.tensors()
            elif part is not None:
                yield part


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RoutedExperts:
    """The experts of a layer, and how tokens get to them.

    `each` are (gate_up, down) of every expert; `stack` the same weights for Triton, which are not there for others. Of
    a stack of codes there is no `each`.
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
