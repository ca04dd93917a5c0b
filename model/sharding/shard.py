"""Which rows and columns of each tensor a rank holds.

Attention is cut by heads, and a feed by its inner numbers. Projections to them are cut by rows, those back to the
hidden size by columns: their products are parts of a sum. The output layer is cut by rows, the embedding not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ..families import names
from ..spec import AttentionSpec, DecoderSpec, FeedSpec, LayerSpec, MoeSpec

ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a tensor that a rank holds; `is_held` is False for one that another rank adds alone."""

    rows: slice = field(default_factory=lambda: ALL)
    columns: slice = field(default_factory=lambda: ALL)
    is_held: bool = True

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the part."""
        sizes = [len(range(size)[cut]) for size, cut in zip(whole, (self.rows, self.columns), strict=False)]
        return (*sizes, *whole[2:])


WHOLE = Cut()


@dataclass(frozen=True, slots=True)
class RankShare:
    """The share of rank `rank` of `size`."""

    rank: int
    size: int

    def part(self, count: int, width: int = 1) -> slice:
        """The rank's share of `count` items of `width` numbers each. Shares differ by one item at most."""
        begin, end = (count * edge // self.size for edge in (self.rank, self.rank + 1))
        return slice(begin * width, end * width)

    def key_heads(self, count: int, width: int = 1) -> slice:
        """As `part`, of `count` key/value heads: with fewer heads than ranks, several ranks hold the same one."""
        if count >= self.size:
            return self.part(count, width)
        head = self.rank * count // self.size
        return slice(head * width, (head + 1) * width)


def why_not_cut(spec: DecoderSpec, size: int) -> str | None:
    """Why `size` ranks cannot share the decoder, with what can; None if they can."""
    if spec.recurrent_layers:
        return f"{spec.family} has recurrent layers, which ranks do not share; use 1"
    if not spec.has_one_shape or spec.donors or spec.embedding.per_layer is not None:
        return f"layers of {spec.family} differ in keys and values, which ranks do not share; use 1"
    if spec.latents:
        return f"{spec.family} keeps latents of all heads together, which ranks do not share; use 1"
    for attention in dict.fromkeys(spec.attentions):
        heads, keys = attention.num_heads, attention.num_kv_heads
        if attention.qk_norm is not None and attention.qk_norm.over == "row":
            return f"{spec.family} norms the queries of all heads together, which ranks hold in parts; use 1"
        if heads % size or (keys % size and size % keys):
            sizes = [n for n in range(1, heads + 1) if heads % n == 0 and (keys % n == 0 or n % keys == 0)]
            return f"must divide {heads} heads, and divide {keys} key/value heads or be a multiple; use {listed(sizes)}"
    feeds = (feed for layer in dict.fromkeys(spec.layers) for feed, _ in names.feeds_of(layer))
    smallest = min((feed.intermediate_size for feed in feeds), default=size)
    if min(smallest, spec.vocab_size) < size:
        return f"a rank would have nothing of a feed of {smallest} numbers and {spec.vocab_size} tokens; use less"
    return None


def listed(sizes: list[int]) -> str:
    """Numbers in words: 1, 2 or 4."""
    return " or ".join(filter(None, (", ".join(map(str, sizes[:-1])), str(sizes[-1]))))


def spec_of(spec: DecoderSpec, shard: RankShare) -> DecoderSpec:
    """The decoder that a rank computes: its heads and inner numbers. Equal layers stay one object."""
    made: dict[int, LayerSpec] = {}
    for layer in spec.layers:
        if id(layer) not in made:
            made[id(layer)] = _layer(layer, shard)
    return replace(spec, layers=tuple(made[id(layer)] for layer in spec.layers))


def cuts_of(spec: DecoderSpec, shard: RankShare) -> dict[str, Cut]:
    """The rank's part of each canonical tensor that it does not hold whole, by name; `spec` is the whole decoder."""
    if shard.size == 1:
        return {}
    found = {}
    for index, layer in enumerate(spec.layers):
        for stem, cut in _cuts(layer, shard):
            stem = stem.replace("*", str(index))
            found[stem if stem.endswith(".sinks") else f"{stem}.weight"] = cut
            found[f"{stem}.bias"] = bias_of(cut, shard)
    vocabulary = Cut(shard.part(spec.vocab_size))
    return found | {f"{names.HEAD}.weight": vocabulary, f"{names.HEAD}.bias": vocabulary}


def bias_of(cut: Cut, shard: RankShare) -> Cut:
    """The part of a linear's bias: the rows, or with parts of a sum all of it on the first rank."""
    return Cut(cut.rows) if cut.columns == ALL else Cut(is_held=shard.rank == 0)


def _layer(layer: LayerSpec, shard: RankShare) -> LayerSpec:
    mixer, feed = layer.mixer, layer.feed
    assert isinstance(mixer, AttentionSpec) and feed is not None, "missing() refuses others"
    heads, keys = shard.part(mixer.num_heads), shard.key_heads(mixer.num_kv_heads)
    return replace(
        layer,
        mixer=replace(mixer, num_heads=heads.stop - heads.start, num_kv_heads=keys.stop - keys.start),
        feed=_feed(feed, shard) if isinstance(feed, FeedSpec) else _experts(feed, shard),
    )


def _feed(feed: FeedSpec, shard: RankShare) -> FeedSpec:
    inner = shard.part(feed.intermediate_size)
    return replace(feed, intermediate_size=inner.stop - inner.start)


def _experts(moe: MoeSpec, shard: RankShare) -> MoeSpec:
    """Every rank routes, and has its inner numbers of each expert."""
    shared, dense = (None if feed is None else _feed(feed, shard) for feed in (moe.shared, moe.dense_beside))
    return replace(moe, expert=_feed(moe.expert, shard), shared=shared, dense_beside=dense)


def _cuts(layer: LayerSpec, shard: RankShare) -> Iterator[tuple[str, Cut]]:
    mixer = layer.mixer
    assert isinstance(mixer, AttentionSpec), "missing() refuses others"
    dim, value_dim = mixer.head_dim, mixer.value_dim or mixer.head_dim
    yield names.Q, Cut(shard.part(mixer.num_heads, dim))
    yield names.K, Cut(shard.key_heads(mixer.num_kv_heads, dim))
    yield names.V, Cut(shard.key_heads(mixer.num_kv_heads, value_dim))
    yield names.OUTPUT, Cut(columns=shard.part(mixer.num_heads, value_dim))
    if mixer.qk_norm is not None and mixer.qk_norm.has_weight_per_head:
        yield names.Q_NORM, Cut(shard.part(mixer.num_heads, dim))
        yield names.K_NORM, Cut(shard.key_heads(mixer.num_kv_heads, dim))
    if mixer.has_sinks:
        yield names.SINKS, Cut(shard.part(mixer.num_heads))
    for feed, stems in names.feeds_of(layer):
        inner = shard.part(feed.intermediate_size)
        for stem in stems[:2]:
            yield stem, Cut(inner)
        yield stems[2], Cut(columns=inner)
