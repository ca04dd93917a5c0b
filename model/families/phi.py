"""Phi-1, 1.5 and 2, which differ from Llama in nearly everything; Phi-3, 3.5, 4 and 4-mini, which are Llama inside."""

from __future__ import annotations

from ..config_keys import ConfigKeys
from ..errors import quoted
from ..rope_config import rope_keys
from ..spec import DecoderSpec, HeadSpec, QkNorm
from .building import Family, decoder, feed, layer_norm, layers_of, rms_norm, rope
from .names import DOWN, FINAL_NORM, K_NORM, LAYER, OUTPUT, Q_NORM, UP, K, Names, Q, V, fused_gate_up, fused_qkv, split
from .reading import sizes, windows


def phi(keys: ConfigKeys) -> DecoderSpec:
    """Phi-1 and 2: attention and feed beside each other, one LayerNorm, biases everywhere, half of a head rotates."""
    found, norm = sizes(keys), layer_norm(keys)
    inner = feed(keys, activation="gelu_new", is_gated=False, has_bias=True)
    qk_norm = QkNorm(norm=norm) if keys.flag("qk_layernorm", False) else None
    around = {"is_parallel": True, "pre_feed": None}
    layers = layers_of(found, norm, inner, around=around, has_qkv_bias=True, has_output_bias=True, qk_norm=qk_norm)
    head = HeadSpec(is_tied=keys.flag("tie_word_embeddings", False), has_bias=True)
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found, share=0.5),), head=head)


def phi_names(spec: DecoderSpec) -> Names:
    """Other names of what follows attention and of the feed."""
    mlp = {UP: f"{LAYER}.mlp.fc1", DOWN: f"{LAYER}.mlp.fc2"}
    norms = {Q_NORM: f"{LAYER}.self_attn.q_layernorm", K_NORM: f"{LAYER}.self_attn.k_layernorm"}
    return {OUTPUT: f"{LAYER}.self_attn.dense", FINAL_NORM: "model.final_layernorm", **norms, **mlp}


def phi3(keys: ConfigKeys) -> DecoderSpec:
    """Phi-3 and 4: perhaps rotary factors of its own for long sequences, and a window on all layers."""
    keys = _with_longrope(keys)
    found, norm = sizes(keys, max_position=4096), rms_norm(keys, default=1e-5)
    positions = rope(keys, found, share=1.0)
    if positions.kind not in ("default", "longrope"):
        rope_keys(keys).fail("rope_type", f"{quoted(positions.kind)} is not supported; supported: default, longrope")
    on = windows(keys, found.num_layers, 4096, is_on=keys.values.get("sliding_window") is not None)
    layers = layers_of(found, norm, feed(keys), windows=on)
    return decoder(keys, found, layers, final_norm=norm, ropes=(positions,))


def _with_longrope(keys: ConfigKeys) -> ConfigKeys:
    """The keys with the length before stretching beside the rotary parameters, whose kind "yarn" means "longrope"."""
    values = {"original_max_position_embeddings": 4096, **keys.values}
    for name in ("rope_scaling", "rope_parameters"):
        scaling = values.get(name)
        if isinstance(scaling, dict) and "yarn" in (scaling.get("rope_type"), scaling.get("type")):
            values[name] = {**scaling, "rope_type": "longrope"}
    return ConfigKeys(values, keys.source, keys.stored_names)


def phi3_names(spec: DecoderSpec) -> Names:
    """Queries, keys and values in one matrix, gate and up in another."""
    qkv = split(f"{LAYER}.self_attn.qkv_proj", (Q, K, V), fused_qkv(spec.attention))
    return {**qkv, **fused_gate_up(spec)}


FAMILIES = {"phi": Family(spec=phi, names=phi_names), "phi3": Family(spec=phi3, names=phi3_names)}
