"""Bamba: Mamba-2 layers, and some with attention whose heads rotate by half."""

from __future__ import annotations

from ...config_keys import ConfigKeys
from ...spec import DecoderSpec
from ..building import Family, biases, decoder, feed, layers_of, rms_norm, rope
from ..names import DOWN, FINAL_NORM, GATE, LAYER, PRE_FEED, UP, Names
from ..reading import sizes
from .mamba2 import in_layers, mamba2, mamba2_names


def bamba(keys: ConfigKeys) -> DecoderSpec:
    """Bamba: `attn_layer_indices` are the layers with attention."""
    listed = keys.values.get("attn_layer_indices") or []
    if not isinstance(listed, list):
        keys.fail("attn_layer_indices", "must list numbers of layers")
    found = sizes(keys, num_heads=32, num_kv_heads=8, max_position=262_144)
    if not any(layer in listed for layer in range(found.num_layers)):
        keys.refuse("attn_layer_indices", "names no layer, and a model of recurrent layers alone is not supported")
    norm = rms_norm(keys, default=1e-5)
    layers = layers_of(found, norm, feed(keys, has_bias=keys.flag("mlp_bias", False)), **biases(keys))
    spec = decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found, share=0.5),))
    types = ["full_attention" if layer in listed else "linear_attention" for layer in range(found.num_layers)]
    return in_layers(spec, types, mamba2(keys, found.hidden_size, norm))


def names(spec: DecoderSpec) -> Names:
    """Names of the mixer, the feed and two norms."""
    feeds = {stem: stem.replace(".mlp.", ".feed_forward.") for stem in (GATE, UP, DOWN)}
    norms = {PRE_FEED: f"{LAYER}.pre_ff_layernorm", FINAL_NORM: "model.final_layernorm"}
    return {**mamba2_names(spec, f"{LAYER}.mamba"), **feeds, **norms}


FAMILIES = {"bamba": Family(spec=bamba, names=names)}
