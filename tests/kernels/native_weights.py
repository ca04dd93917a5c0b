"""Small shapes of native models, and random weights for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.kernels.native.shape import NativeLayer, NativeNorm, NativeQkNorm, NativeShape

Array = NDArray[Any]

SMALL: dict[str, Any] = {
    "vocab_size": 70,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 32,
    "intermediate_size": 72,
    "rotary_dim": 32,
    "rms_norm_eps": 1e-5,
    "is_tied": True,
}
LATENT_NORM = NativeNorm(eps=1e-6)


def small_shape(
    has_qk_norm: bool = False, layer: dict[str, Any] | None = None, last: dict[str, Any] | None = None, **sizes: Any
) -> NativeShape:
    """SMALL, with other sizes; `layer`: fields that all layers get, `last`: those that the last one gets besides.

    `eps` of its norms is `rms_norm_eps`, unless a norm is given."""
    sizes = {**SMALL, **sizes}
    norm = NativeNorm(eps=sizes.pop("rms_norm_eps"))
    num_layers, inner, rotary_dim = (sizes.pop(name) for name in ("num_layers", "intermediate_size", "rotary_dim"))
    windows = sizes.pop("sliding_windows", (None,) * num_layers)
    assert len(windows) == num_layers, f"{windows} for {num_layers} layers"
    fields = {
        "intermediate_size": inner,
        "pre_mixer": norm,
        "pre_feed": norm,
        "qk_norm": NativeQkNorm(norm=norm) if has_qk_norm else None,
        **(layer or {}),
    }
    layers = [NativeLayer(window=window, **fields) for window in windows]
    if last:
        layers[-1] = replace(layers[-1], **last)
    return NativeShape(**{"layers": tuple(layers), "rotary_dims": (rotary_dim,), "final_norm": norm, **sizes})


WEIGHT_OPTIONS = ("has_bias", "has_norm_bias", "has_norm_weight", "has_sinks", "has_choice_bias")  # of what follows


def random_tensors(
    shape: NativeShape,
    *,
    has_bias: bool = False,
    has_norm_bias: bool = False,
    has_norm_weight: bool = True,
    has_sinks: bool = False,
    has_choice_bias: bool = False,
    seed: int = 0,
) -> dict[str, Array]:
    """Random weights for a shape, by the names checkpoints give them."""
    draw = np.random.default_rng(seed)
    hidden = shape.hidden_size
    tensors: dict[str, Array] = {}

    def put(name: str, *sizes: int, mean: float = 0.0, scale: float = 0.1) -> None:
        tensors[name] = round_to_bfloat16((mean + scale * draw.standard_normal(sizes)).astype(np.float32))

    def put_norm(name: str, norm: NativeNorm | None, *sizes: int) -> None:
        if norm is not None and has_norm_weight:
            put(f"{name}.weight", *sizes, mean=1.0)
        if norm is not None and has_norm_bias:
            put(f"{name}.bias", *sizes)

    put("model.embed_tokens.weight", shape.vocab_size, hidden, scale=1.0)
    if not shape.is_tied:
        put("lm_head.weight", shape.vocab_size, hidden)
    if shape.has_head_bias:
        put("lm_head.bias", shape.vocab_size, scale=1.0)
    if shape.num_learned_positions:
        put("model.embed_positions.weight", shape.num_learned_positions, hidden)
    put_norm("model.norm", shape.final_norm, hidden)
    put_norm("model.embed_layernorm", shape.embedding_norm, hidden)
    if (inputs := shape.layer_inputs) is not None:
        size = shape.num_layers * inputs.width
        put("model.per_layer.embed_tokens.weight", inputs.rows, size, scale=1.0)
        put("model.per_layer.projection.weight", size, hidden)
        put_norm("model.per_layer.norm", inputs.norm, inputs.width)
    for index, layer in enumerate(shape.layers):
        prefix = f"model.layers.{index}"
        for name, norm in norms_of(layer).items():
            put_norm(f"{prefix}.{name}", norm, hidden)
        heads = shape.heads_of(layer)
        all_heads, kv = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        rows = {"q": (all_heads, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, all_heads)}
        if (latents := layer.latents) is not None:
            queries = heads.num_heads * (latents.nope_dim + latents.rope_dim)
            rows = {"q": (queries, hidden), "o": (hidden, heads.num_heads * latents.value_dim)}
            put(f"{prefix}.self_attn.kv_a_proj_with_mqa.weight", latents.kv_rank + latents.rope_dim, hidden)
            put_norm(f"{prefix}.self_attn.kv_a_layernorm", LATENT_NORM, latents.kv_rank)
            ups = heads.num_heads * (latents.nope_dim + latents.value_dim)
            put(f"{prefix}.self_attn.kv_b_proj.weight", ups, latents.kv_rank)
            if latents.q_rank is not None:
                del rows["q"]
                put(f"{prefix}.self_attn.q_a_proj.weight", latents.q_rank, hidden)
                put_norm(f"{prefix}.self_attn.q_a_layernorm", LATENT_NORM, latents.q_rank)
                put(f"{prefix}.self_attn.q_b_proj.weight", queries, latents.q_rank)
        for name, size in rows.items():
            if (name == "v" and layer.is_k_v) or (name in "kv" and layer.kv_of is not None):
                continue
            put(f"{prefix}.self_attn.{name}_proj.weight", *size)
            if has_bias:
                put(f"{prefix}.self_attn.{name}_proj.bias", size[0])
        networks = [(network_of(layer), layer.intermediate_size, layer.is_gated)] if layer.intermediate_size else []
        if experts := layer.experts:
            put(f"{prefix}.mlp.gate.weight", experts.num_experts, hidden, scale=0.3)
            if has_bias:
                put(f"{prefix}.mlp.gate.bias", experts.num_experts)
            put_norm(f"{prefix}.mlp.gate_norm", experts.router_norm, hidden)
            if experts.router_norm is not None:
                put(f"{prefix}.mlp.expert_scale", experts.num_experts, mean=1.0)
            for part in ("pre_experts", "post_experts", "post_dense"):
                put_norm(f"{prefix}.{part}_layernorm", experts.own_norms, hidden)
            if has_choice_bias:
                put(f"{prefix}.mlp.gate.e_score_correction_bias", experts.num_experts, mean=-1.0)
            if experts.has_shared_gate:
                put(f"{prefix}.mlp.shared_expert_gate.weight", 1, hidden)
            one = experts.intermediate_size, experts.is_gated
            networks += [(f"mlp.experts.{expert}", *one) for expert in range(experts.num_experts)]
        for network, inner, is_gated in networks:
            matrices = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
            for name, size in matrices.items():
                if name == "gate" and not is_gated:
                    continue
                put(f"{prefix}.{network}.{name}_proj.weight", *size)
                if has_bias:
                    put(f"{prefix}.{network}.{name}_proj.bias", size[0])
        if layer.activation == "xielu":
            put(f"{prefix}.mlp.act_alpha", 2, mean=0.8)
        if has_sinks:
            put(f"{prefix}.self_attn.sinks", heads.num_heads, scale=2.0)
        if layer.has_output_scale:
            put(f"{prefix}.output_scale", 1, mean=0.8)
        if inputs is not None:
            put(f"{prefix}.per_layer.gate_proj.weight", inputs.width, hidden)
            put(f"{prefix}.per_layer.up_proj.weight", hidden, inputs.width)
            put_norm(f"{prefix}.per_layer.norm", inputs.norm, hidden)
        if (qk := layer.qk_norm) is not None and layer.latents is None:
            dims = {"q": (heads.num_heads, heads.head_dim)}
            if layer.kv_of is None:
                dims["k"] = (heads.num_kv_heads, heads.head_dim)
            for name, (count, dim) in dims.items():
                size = (count, dim) if qk.has_weight_per_head else (count * dim,) if qk.is_over_row else (dim,)
                put_norm(f"{prefix}.self_attn.{name}_norm", qk.norm, *size)
    return tensors


def norms_of(layer: NativeLayer) -> dict[str, NativeNorm | None]:
    """The norms of rows of the residual, by the names of their tensors."""
    return {
        "input_layernorm": layer.pre_mixer,
        "post_mixer_layernorm": layer.post_mixer,
        "post_attention_layernorm": layer.pre_feed,
        "post_feed_layernorm": layer.post_feed,
    }


def network_of(layer: NativeLayer) -> str:
    """The name of the network that all tokens take."""
    return "mlp.shared_experts" if layer.is_shared else "mlp"


def round_to_bfloat16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest numbers that bfloat16 holds, ties to even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
