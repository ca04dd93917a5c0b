"""Which layers each rank of a pipeline holds: consecutive ones, so that the largest share of bytes is least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..checkpoint.tensor_shapes import expected_shapes
from ..families import names
from ..lora.adapter import Adapter
from ..spec import AttentionSpec, DecoderSpec, LayerSpec


@dataclass(frozen=True, slots=True)
class LayerRange:
    """The layers [begin, end) of a decoder with `count`."""

    begin: int
    end: int
    count: int

    @property
    def is_first(self) -> bool:
        """Whether it begins with the embedding."""
        return self.begin == 0

    @property
    def is_last(self) -> bool:
        """Whether the output layer follows."""
        return self.end == self.count


def why_not_split(spec: DecoderSpec, size: int) -> str | None:
    """Why the layers cannot be dealt over `size` ranks, with what can; None if they can."""
    if not spec.has_one_shape:
        return f"layers of {spec.family} differ in keys and values, which ranks of layers do not keep; use 1"
    if spec.embedding.per_layer is not None:
        return f"layers of {spec.family} read the embedding of each token, which only the first rank has; use 1"
    if size > (most := _most_ranges(spec)):
        why = ", as layers that share keys and values stay together" if spec.donors else ""
        if most <= len(_cuts(spec)):
            why = ", as each needs one with attention"
        ranks, use = ("1 rank", "1") if most == 1 else (f"{most} ranks", f"{most} or less")
        return f"{spec.family} has {spec.num_layers} layers, for {ranks} at most{why}; use {use}"
    return None


def split_layers(spec: DecoderSpec, size: int) -> list[LayerRange]:
    """`size` ranges whose largest has the fewest bytes; the embedding and the output layer count. See `why_not_split`.

    Each has a layer with attention. Of equal splits the one whose last ranges are smaller.
    """
    sizes = layer_sizes(spec)
    sums = [0]
    for one in sizes:
        sums.append(sums[-1] + one)
    first, last = _ends(spec)
    count, cuts, num_keeping = len(sizes), _cuts(spec), _num_keeping(spec)

    def weight(begin: int, end: int) -> int:
        return sums[end] - sums[begin] + (first if begin == 0 else 0) + (last if end == count else 0)

    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}  # end -> (largest, edges) of the ranges so far
    for number in range(1, size + 1):
        ends = [count] if number == size else cuts
        found = {}
        for end in ends:
            ways = [
                (max(largest, weight(begin, end)), (*edges, end))
                for begin, (largest, edges) in best.items()
                if num_keeping[begin] < num_keeping[end]
            ]
            if ways:
                found[end] = min(ways, key=lambda way: (way[0], [-edge for edge in way[1]]))
        best = found
    return [LayerRange(begin, end, count) for begin, end in pairwise(best[count][1])]


def layer_sizes(spec: DecoderSpec) -> list[int]:
    """Numbers in the weights of each layer."""
    stem = names.LAYER.partition("*")[0]
    sizes = [0] * spec.num_layers
    for name, shape in expected_shapes(spec).items():
        if name.startswith(stem):
            sizes[int(name.removeprefix(stem).partition(".")[0])] += math.prod(shape)
    return sizes


def spec_of_layers(spec: DecoderSpec, layers: LayerRange) -> DecoderSpec:
    """The decoder of a range. Equal layers stay one object."""
    made: dict[int, LayerSpec] = {}
    for layer in spec.layers[layers.begin : layers.end]:
        if id(layer) not in made:
            made[id(layer)] = _shifted(layer, layers.begin)
    return replace(spec, layers=tuple(made[id(layer)] for layer in spec.layers[layers.begin : layers.end]))


def adapter_of_layers(adapter: Adapter, layers: LayerRange) -> Adapter:
    """The part of a LoRA adapter for a range, whose layers count from 0."""
    linears = {
        (layer - layers.begin, linear): slices
        for (layer, linear), slices in adapter.linears.items()
        if layers.begin <= layer < layers.end
    }
    return Adapter(adapter.name, adapter.parent, adapter.dtype, linears)


def in_words(ranges: Sequence[LayerRange]) -> list[str]:
    """For the log: "embedding, 0-5", "6-11, head"."""
    return [
        ", ".join(
            [
                *(["embedding"] if one.is_first else []),
                f"{one.begin}-{one.end - 1}",
                *(["head"] if one.is_last else []),
            ]
        )
        for one in ranges
    ]


def _cuts(spec: DecoderSpec) -> list[int]:
    """The layers before which a range may begin: none lies between a layer and the one whose cache it reads."""
    return [
        edge
        for edge in range(1, spec.num_layers)
        if not any(donor < edge <= reader for reader, donor in spec.donors.items())
    ]


def _num_keeping(spec: DecoderSpec) -> list[int]:
    """Before each edge between layers, how many keep keys and values, or latents: each rank's cache needs one."""
    return [sum(layer < edge for layer in spec.kv_layers) for edge in range(spec.num_layers + 1)]


def _most_ranges(spec: DecoderSpec) -> int:
    """The most ranges, each as short as it can be."""
    num_keeping = _num_keeping(spec)
    count, begin = 0, 0
    for edge in [*_cuts(spec), spec.num_layers]:
        if num_keeping[begin] < num_keeping[edge]:
            count, begin = count + 1, edge
    return count


def _ends(spec: DecoderSpec) -> tuple[int, int]:
    """Numbers in the embedding, and in the output layer, which the last rank has too if it is the same."""
    table = spec.vocab_size * spec.hidden_size
    return table, table


def _shifted(layer: LayerSpec, by: int) -> LayerSpec:
    mixer = layer.mixer
    if not by or not isinstance(mixer, AttentionSpec) or mixer.kv_of is None:
        return layer
    return replace(layer, mixer=replace(mixer, kv_of=mixer.kv_of - by))
