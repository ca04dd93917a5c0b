"""One process that sums as several ranks would: each product in the pieces that the ranks compute. For debugging.

What differs between one process and several is then not the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..sharding.comm import ordered_sum
from ..sharding.shard import RankShare
from ..spec import AttentionSpec, DecoderSpec, FeedSpec
from .linear import Linear, held
from .weights import DecoderWeights, LayerWeights, NormWeights

Columns = Callable[[Sequence[Tensor]], Tensor]


class JoinedLinear(Linear):
    """A linear whose pieces give other columns each; `join` puts them in the order of the whole linear."""

    def __init__(self, pieces: Sequence[Linear], join: Columns) -> None:
        self._pieces, self._join = pieces, join

    def __call__(self, x: Tensor) -> Tensor:
        return self._join([piece(x) for piece in self._pieces])

    def unrounded(self, x: Tensor) -> Tensor:
        return self._join([piece.unrounded(x) for piece in self._pieces])

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)

    @property
    def dtype(self) -> torch.dtype:
        return self._pieces[0].dtype

    def tensors(self) -> Iterator[Tensor]:
        for piece in self._pieces:
            yield from piece.tensors()


class SummedLinear(JoinedLinear):
    """A linear whose pieces read other numbers of x each, `sizes` of them, and give parts of a sum."""

    def __init__(self, pieces: Sequence[Linear], sizes: Sequence[int]) -> None:
        super().__init__(pieces, ordered_sum)
        self._sizes = list(sizes)

    def __call__(self, x: Tensor) -> Tensor:
        parts = torch.split(x, self._sizes, dim=1)
        return ordered_sum([piece(part.contiguous()) for piece, part in zip(self._pieces, parts, strict=True)])

    def unrounded(self, x: Tensor) -> Tensor:
        return self(x)


def emulated(spec: DecoderSpec, shares: Sequence[DecoderWeights]) -> DecoderWeights:
    """The weights of the whole decoder `spec`, of the shares of all its ranks in their order."""
    layers = tuple(_layer(spec, index, shares) for index in range(spec.num_layers))
    head = JoinedLinear([share.head for share in shares], lambda parts: torch.cat(list(parts), dim=1))
    return replace(shares[0], layers=layers, head=head)


def _layer(spec: DecoderSpec, index: int, shares: Sequence[DecoderWeights]) -> LayerWeights:
    mixer, feed, layers = spec.layers[index].mixer, spec.layers[index].feed, [share.layers[index] for share in shares]
    assert isinstance(mixer, AttentionSpec), "missing() refuses others"
    value_dim = mixer.value_dim or mixer.head_dim
    shards = [RankShare(rank, len(shares)) for rank in range(len(shares))]
    heads = [_size(shard.part(mixer.num_heads, mixer.head_dim)) for shard in shards]
    inner = [_size(shard.part(feed.intermediate_size)) for shard in shards] if isinstance(feed, FeedSpec) else []
    gate_up = [layer.gate_up for layer in layers if layer.gate_up is not None]
    down = [layer.down for layer in layers if layer.down is not None]
    outputs = [_size(shard.part(mixer.num_heads, value_dim)) for shard in shards]
    keys = [shard.key_heads(mixer.num_kv_heads, mixer.head_dim) for shard in shards]
    values = [shard.key_heads(mixer.num_kv_heads, value_dim) for shard in shards]
    new = [rank for rank, part in enumerate(keys) if rank == 0 or part != keys[rank - 1]]  # that hold other heads

    def join_heads(parts: Sequence[Tensor]) -> Tensor:
        sizes = [[heads[rank], _size(keys[rank]), _size(values[rank])] for rank in range(len(shares))]
        cut = [torch.split(part, sizes[rank], 1) for rank, part in enumerate(parts)]
        queries = [part[0] for part in cut]
        return torch.cat([*queries, *(cut[rank][1] for rank in new), *(cut[rank][2] for rank in new)], dim=1)

    def join_inner(parts: Sequence[Tensor]) -> Tensor:
        cut = [torch.split(part, inner[rank], 1) for rank, part in enumerate(parts)]
        return torch.cat([one for group in zip(*cut, strict=True) for one in group], dim=1)

    def join_norms(norms: Sequence[NormWeights | None]) -> NormWeights | None:
        """The norm of all heads; one that all heads share is the same in each share."""
        assert mixer.qk_norm is not None
        first = norms[0]
        if first is None or len(norms) == 1 or not mixer.qk_norm.has_weight_per_head:
            return first
        weights, biases = zip(*((norm.weight, norm.bias) for norm in norms if norm is not None), strict=True)
        return replace(first, weight=_joined(weights), bias=_joined(biases))

    has_norms = mixer.qk_norm is not None
    return replace(
        layers[0],
        q_norm=join_norms([layer.q_norm for layer in layers]) if has_norms else None,
        k_norm=join_norms([layers[rank].k_norm for rank in new]) if has_norms else None,
        sinks=_joined([layer.sinks for layer in layers]),
        qkv=JoinedLinear([held(layer.qkv) for layer in layers], join_heads),
        output=SummedLinear([held(layer.output) for layer in layers], outputs),
        gate_up=JoinedLinear(gate_up, join_inner) if gate_up else None,
        down=SummedLinear(down, inner) if down else None,
        experts=tuple(experts for layer in layers for experts in layer.experts),
    )


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """What the ranks have of a tensor, in their order; None if they have none."""
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


def _size(part: slice) -> int:
    return int(part.stop - part.start)
