"""What each backend lacks of a decoder's spec, in words. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from .spec import AttentionSpec, DecoderSpec, LayerSpec, MoeSpec, RecurrentSpec

Backend = Literal["native", "torch", "triton"]


def missing(spec: DecoderSpec, backend: Backend) -> list[str]:
    """What the backend does not compute of the decoder; empty: it serves it."""
    found: dict[str, None] = {}  # in order, each once
    if spec.embedding.width not in (None, spec.hidden_size):
        found[f"an embedding of {spec.embedding.width} numbers beside layers of {spec.hidden_size}"] = None
    for layer in dict.fromkeys(spec.layers):
        found.update(dict.fromkeys(_of_layer(layer)))
        if isinstance(layer.feed, MoeSpec) and backend != "native":
            found.update(dict.fromkeys(_of_experts(layer.feed)))
        if isinstance(layer.mixer, AttentionSpec):
            found.update(dict.fromkeys(_of_kernels(layer.mixer, backend)))
    if not spec.attentions:
        found["decoders without any attention"] = None
    if not spec.has_one_shape and len({_sizes(one) for one in spec.attentions if _sees_all(one)}) != 1:
        found["layers whose heads have different sizes, of which not one size sees all keys"] = None
    if spec.latents and len(spec.latents) < len(spec.attentions):
        found["latents beside keys and values"] = None
    found.update(dict.fromkeys(_of_longrope(spec)))
    if backend == "native" and not found:
        found.update(dict.fromkeys(_of_native_step(spec)))
    return list(found)


def _sizes(attention: AttentionSpec) -> tuple[int, ...]:
    return attention.num_heads, attention.num_kv_heads, attention.head_dim


def _sees_all(attention: AttentionSpec) -> bool:
    return attention.window is None and attention.chunk is None and attention.kv_of is None


def _of_layer(layer: LayerSpec) -> Iterator[str]:
    """What no backend has yet."""
    mixer = layer.mixer
    if isinstance(mixer, RecurrentSpec):
        if mixer.kind not in ("gdn", "mamba2", "short_conv"):
            yield f"recurrent layers: {mixer.kind}"
    elif isinstance(mixer, AttentionSpec):
        yield from _of_attention(mixer)
    if layer.is_post_norm:
        yield "norms after the residual is added"
    if layer.is_parallel and isinstance(layer.feed, MoeSpec) and layer.feed.own_norms is not None:
        yield "norms of experts beside attention"


def _of_experts(moe: MoeSpec) -> Iterator[str]:
    """What torch and Triton lack; see `_of_native_experts` for the other."""
    if moe.router.scales_input:
        yield "weights of experts that multiply their input"
    if "xielu" in (feed.activation for feed in (moe.expert, moe.shared, moe.dense_beside) if feed is not None):
        yield "experts with the activation xielu"


def _of_attention(attention: AttentionSpec) -> Iterator[str]:
    if attention.value_dim not in (None, attention.head_dim):
        yield f"values of {attention.value_dim} numbers beside keys of {attention.head_dim}"
    if attention.v_norm is not None and attention.v_norm.weight != "none":
        yield "a norm of values with a weight"


def _of_longrope(spec: DecoderSpec) -> Iterator[str]:
    """What factors that depend on the length of a sequence do not go with: `StepInputs.positions` are not its own."""
    lengths = {rope.original_max_position for rope in spec.ropes if rope.kind == "longrope"}
    if len(lengths) > 1:
        yield f"rotary factors that change at several lengths: {', '.join(map(str, sorted(lengths)))}"
    if lengths and spec.embedding.positions is not None:
        yield "learned positions beside rotary factors that depend on the length"
    if lengths and any(attention.query_temper for attention in spec.attentions):
        yield "queries scaled by position beside rotary factors that depend on the length"


def _of_kernels(attention: AttentionSpec, backend: Backend) -> Iterator[str]:
    norm = attention.qk_norm
    if backend == "native" and attention.has_alibi:
        yield "alibi"
    if backend == "triton" and not attention.scale > 0:
        yield f"scores times {attention.scale:g}"
    if backend == "triton" and attention.is_alibi_rounded:
        yield "alibi rounded to bfloat16"
    if backend == "native" and attention.chunk is not None:
        yield "attention in chunks of positions"
    if backend != "torch" and norm is not None and norm.norm.has_bias:
        yield "norms of queries and keys with a bias"
    if backend == "triton" and norm is not None and norm.over == "row" and norm.when == "after_rope":
        yield "norms over rows of heads after the rotation"


def _of_native_step(spec: DecoderSpec) -> Iterator[str]:
    """What the native step lacks besides."""
    if not spec.head.scale > 0:
        yield f"logits times {spec.head.scale:g}"
    for layer in dict.fromkeys(spec.layers):
        if isinstance(layer.feed, MoeSpec):
            yield from _of_native_experts(layer.feed)


def _of_native_experts(moe: MoeSpec) -> Iterator[str]:
    if moe.shared is not None and moe.dense_beside is not None:
        yield "shared experts beside another network"
    if moe.own_norms is None and moe.router.input_norm is not None:
        yield "a norm of what the router reads"
    if moe.own_norms is not None and moe.router.input_norm is None:
        yield "norms of experts whose router has none"
    if moe.expert.activation == "xielu":
        yield "experts with the activation xielu"
