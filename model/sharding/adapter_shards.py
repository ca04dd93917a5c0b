"""A rank's share of a LoRA adapter: B's rows where the linear is cut by rows, A's columns where it is by columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..lora.adapter import Adapter, AdapterSlice, LinearName
from ..spec import AttentionSpec, DecoderSpec, FeedSpec
from .shard import ALL, RankShare

Part = tuple[int, slice]  # rows of a part of a linear, and those of them that the rank holds


def adapter_shard(adapter: Adapter, spec: DecoderSpec, shard: RankShare) -> Adapter:
    """The adapter for the rank's linears; `spec` is the whole decoder. Slices keep their order."""
    linears = {}
    for (layer, linear), slices in adapter.linears.items():
        rows, columns = _parts(spec, layer, linear, shard)
        if columns != ALL:
            linears[layer, linear] = tuple(replace(one, a=np.ascontiguousarray(one.a[:, columns])) for one in slices)
        else:
            linears[layer, linear] = tuple(cut for one in slices for cut in _held(one, rows))
    return Adapter(adapter.name, adapter.parent, adapter.dtype, {key: one for key, one in linears.items() if one})


def _held(one: AdapterSlice, parts: list[Part]) -> Iterator[AdapterSlice]:
    """The rows of a slice that the rank holds, at their places in its linear."""
    start, held = 0, 0  # of a part, in the whole linear and in the rank's
    for size, kept in parts:
        begin = max(one.row_start, start + kept.start)
        end = min(one.row_start + one.num_rows, start + kept.stop)
        if begin < end:
            rows = np.ascontiguousarray(one.b[begin - one.row_start : end - one.row_start])
            yield AdapterSlice(held + begin - start - kept.start, one.a, rows)
        start += size
        held += kept.stop - kept.start


def _parts(spec: DecoderSpec, layer: int, linear: LinearName, shard: RankShare) -> tuple[list[Part], slice]:
    """The parts of a linear's rows, and the columns that the rank holds."""
    mixer, feed = spec.layers[layer].mixer, spec.layers[layer].feed
    assert isinstance(mixer, AttentionSpec), "missing() refuses others"
    dim, heads, keys = mixer.head_dim, mixer.num_heads, mixer.num_kv_heads
    if linear == "output":
        return [], shard.part(heads, dim)
    if linear in ("down", "gate_up"):
        assert isinstance(feed, FeedSpec), "adapters of experts are refused"
        inner = feed.intermediate_size
        parts = [(inner, shard.part(inner))] * (2 if feed.is_gated else 1)
        return ([], shard.part(inner)) if linear == "down" else (parts, ALL)
    key_part = (keys * dim, shard.key_heads(keys, dim))
    return [(heads * dim, shard.part(heads, dim)), key_part, key_part], ALL
