"""Command R and R+, Command R7B and Command A: attention and feed beside each other, neighbours rotate together."""

from __future__ import annotations

from typing import Any

from ..config_keys import ConfigKeys
from ..spec import DecoderSpec, HeadSpec, NormSpec, QkNorm
from .building import Family, biases, decoder, feed, layer_norm, layers_of, rope
from .names import K_NORM, Q_NORM, Names, Rows, halves, interleaved
from .reading import Sizes, sizes, windows


def cohere(keys: ConfigKeys) -> DecoderSpec:
    """Command R; R+ norms q and k, each head by weights of its own."""
    has_norm = keys.flag("use_qk_norm", False)
    norm = QkNorm(norm=_norm(keys), has_weight_per_head=True) if has_norm else None
    return _decoder(keys, sizes(keys, max_position=8192), theta=5e5, qk_norm=norm)


def cohere2(keys: ConfigKeys) -> DecoderSpec:
    """Command R7B and A: windows on three layers of four, and the others do not rotate."""
    found, period = sizes(keys, max_position=8192), keys.count("sliding_window_pattern", 4)
    on = windows(keys, found.num_layers, 4096, pattern=lambda layer: (layer + 1) % period != 0)
    return _decoder(keys, found, theta=1e4, windows=on, ropes=[None if window is None else 0 for window in on])


def _decoder(keys: ConfigKeys, found: Sizes, *, theta: float, **changes: Any) -> DecoderSpec:
    """`theta`: default of the base; `changes`: of `layers_of`."""
    norm, around = _norm(keys), {"is_parallel": True, "pre_feed": None}
    layers = layers_of(found, norm, feed(keys), around=around, **biases(keys), **changes)
    head = HeadSpec(is_tied=keys.flag("tie_word_embeddings", True), scale=keys.number("logit_scale", 0.0625))
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found, theta=theta),), head=head)


def _norm(keys: ConfigKeys) -> NormSpec:
    """LayerNorm without a bias."""
    return layer_norm(keys, has_bias=False)


def names(spec: DecoderSpec) -> Names:
    """Rows of neighbours. The weights of a norm of heads are a matrix, [heads, head_dim]."""
    attention = spec.attention
    dim, rotary_dim = attention.head_dim, spec.ropes[0].dim
    norms = {
        stem: Rows(stem, halves(count, dim, rotary_dim), shape=(count, dim))
        for stem, count in ((Q_NORM, attention.num_heads), (K_NORM, attention.num_kv_heads))
    }
    return {**interleaved(attention, rotary_dim), **norms}


FAMILIES = {"cohere": Family(spec=cohere, names=names), "cohere2": Family(spec=cohere2, names=names)}
