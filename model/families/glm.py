"""GLM-4 (dense), Helium and Ernie 4.5 (dense): Llama whose neighbours rotate together, instead of halves of heads."""

from __future__ import annotations

from typing import Any

from ..config_keys import ConfigKeys
from ..spec import DecoderSpec
from .building import Family, biases, decoder, feed, layers_of, rms_norm, rope
from .names import LAYER, POST_FEED, POST_MIXER, Names, fused_gate_up, interleaved
from .reading import sizes


def glm(keys: ConfigKeys) -> DecoderSpec:
    """GLM-4 of 2024: biases of q, k and v, half of a head rotates."""
    return _glm(keys)


def glm4(keys: ConfigKeys) -> DecoderSpec:
    """GLM-4 of 2025, "0414": norms behind attention and feed as well."""
    norm = rms_norm(keys, default=GLM_EPS)
    return _glm(keys, post_mixer=norm, post_feed=norm)


def _glm(keys: ConfigKeys, **around: Any) -> DecoderSpec:
    """`around`: fields of `LayerSpec`."""
    found = sizes(keys, num_kv_heads=2, head_dim=128, max_position=131_072)
    norm = rms_norm(keys, default=GLM_EPS)
    layers = layers_of(found, norm, feed(keys), around=around, has_qkv_bias=keys.flag("attention_bias", True))
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found, share=0.5),))


def helium(keys: ConfigKeys) -> DecoderSpec:
    """Helium: norms that round once, no bias after attention."""
    found = sizes(keys, num_kv_heads=20, head_dim=128, max_position=4096)
    norm, has_bias = rms_norm(keys, default=1e-8, is_exact=True), keys.flag("attention_bias", False)
    inner = feed(keys, has_bias=keys.flag("mlp_bias", False))
    layers = layers_of(found, norm, inner, has_qkv_bias=has_bias)
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found, theta=1e5),))


def ernie4_5(keys: ConfigKeys) -> DecoderSpec:
    """Ernie 4.5: one key for all biases."""
    found = sizes(keys, num_kv_heads=2, head_dim=128, max_position=131_072)
    norm, inner = rms_norm(keys, default=1e-5), feed(keys, has_bias=keys.flag("use_bias", False))
    layers = layers_of(found, norm, inner, **biases(keys, "use_bias"))
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found, theta=5e5),), is_tied=True)


def names(spec: DecoderSpec) -> Names:
    """Rows of neighbours."""
    return interleaved(spec.attention, spec.ropes[0].dim)


def glm_names(spec: DecoderSpec) -> Names:
    """Rows of neighbours; gate and up in one matrix."""
    post = {POST_MIXER: f"{LAYER}.post_self_attn_layernorm", POST_FEED: f"{LAYER}.post_mlp_layernorm"}
    return {**names(spec), **fused_gate_up(spec), **post}


GLM_EPS = 1.5625e-7

FAMILIES = {
    "ernie4_5": Family(spec=ernie4_5, names=names),
    "glm": Family(spec=glm, names=glm_names),
    "glm4": Family(spec=glm4, names=glm_names),
    "helium": Family(spec=helium, names=names),
}
