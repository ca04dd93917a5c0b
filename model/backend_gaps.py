"""What each backend lacks of a decoder's spec, in words. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from .spec import AttentionSpec, DecoderSpec, FeedSpec, LatentSpec, LayerSpec, MoeSpec, NormSpec, RecurrentSpec

Backend = Literal["native", "torch", "triton"]


def missing(spec: DecoderSpec, backend: Backend) -> list[str]:
    """What the backend does not compute of the decoder; empty: it serves it."""
    found: dict[str, None] = {}  # in order, each once
    for layer in dict.fromkeys(spec.layers):
        found.update(dict.fromkeys(_of_layer(layer)))
        if isinstance(layer.mixer, AttentionSpec):
            found.update(dict.fromkeys(_of_kernels(layer.mixer, backend)))
    if len({_sizes(attention) for attention in spec.attentions}) > 1:
        found["layers whose heads have different sizes"] = None
    if backend == "native" and not found:
        found.update(dict.fromkeys(_of_native_step(spec)))
    return list(found)


def _sizes(attention: AttentionSpec) -> tuple[int, ...]:
    return attention.num_heads, attention.num_kv_heads, attention.head_dim


def _of_layer(layer: LayerSpec) -> Iterator[str]:
    """What no backend has yet."""
    mixer, feed = layer.mixer, layer.feed
    if isinstance(mixer, RecurrentSpec):
        yield f"recurrent layers: {mixer.kind}"
    elif isinstance(mixer, LatentSpec):
        yield "latent attention"
    elif mixer is None:
        yield "layers without attention"
    else:
        yield from _of_attention(mixer)
    if isinstance(feed, MoeSpec):
        yield "experts"
    elif feed is None:
        yield "layers without a feed-forward network"
    if layer.has_output_scale:
        yield "a scale of the layer's output"


def _of_attention(attention: AttentionSpec) -> Iterator[str]:
    if attention.value_dim not in (None, attention.head_dim):
        yield f"values of {attention.value_dim} numbers beside keys of {attention.head_dim}"
    if attention.v_norm is not None:
        yield "a norm of values"
    if attention.has_output_gate:
        yield "a gate of attention's output"
    if attention.is_k_v:
        yield "keys that are values"
    if attention.kv_of is not None:
        yield "keys and values shared between layers"


def _of_kernels(attention: AttentionSpec, backend: Backend) -> Iterator[str]:
    if backend == "torch":
        return
    if attention.has_alibi:
        yield "alibi"
    if attention.chunk is not None:
        yield "attention in chunks of positions"


def _of_native_step(spec: DecoderSpec) -> Iterator[str]:
    """What the native step lacks besides."""
    embedding, head = spec.embedding, spec.head
    if embedding.scale != 1.0 or embedding.positions is not None or embedding.norm is not None:
        yield "an embedding with a scale, positions or a norm"
    if head.has_bias or head.scale != 1.0 or head.soft_cap is not None:
        yield "an output layer with a bias, a scale or a cap"
    if len(spec.ropes) != 1:
        yield f"{len(spec.ropes)} kinds of rotary positions"
    eps = {norm.eps for layer in spec.layers for norm in (layer.pre_mixer, layer.pre_feed, spec.final_norm) if norm}
    if len(eps) != 1:
        yield "norms with different eps"
    for layer in dict.fromkeys(spec.layers):
        yield from _of_native_layer(layer)


def _of_native_layer(layer: LayerSpec) -> Iterator[str]:
    attention, feed = layer.mixer, layer.feed
    assert isinstance(attention, AttentionSpec) and isinstance(feed, FeedSpec)
    if layer.is_parallel or layer.residual_scale != 1.0:
        yield "parallel or scaled residuals"
    norms = (layer.pre_mixer, layer.pre_feed)
    if layer.post_mixer or layer.post_feed or None in norms or any(norm and not _is_plain(norm) for norm in norms):
        yield "norms that are not Llama's"
    norm = attention.qk_norm
    if norm and (norm.over != "head" or norm.when != "before_rope" or norm.has_weight_per_head):
        yield "norms of queries and keys that are not Qwen3's"
    if attention.scale != attention.head_dim**-0.5 or attention.soft_cap is not None or attention.has_sinks:
        yield "attention scores with a scale, a cap or sinks"
    if attention.rope is None or attention.query_temper is not None:
        yield "layers without rotary positions, or with tempered queries"
    if not feed.is_gated or feed.activation != "silu":
        yield f"the activation {feed.activation}"


def _is_plain(norm: NormSpec) -> bool:
    return (norm.kind, norm.weight, norm.is_exact) == ("rms", "w", False)
