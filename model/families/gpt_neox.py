"""GPT-NeoX, with Pythia, and GPT-NeoX Japanese: LayerNorm, rotary positions on a quarter of each head, fused qkv.

GPT-NeoX adds attention and feed in parallel, each with a norm of its own, unless `use_parallel_residual` is false.
"""

from __future__ import annotations

from dataclasses import replace

from ..config_keys import ConfigKeys
from ..spec import DecoderSpec, LayerSpec
from .building import Family, attention, decoder, feed, layer_norm, renamed, rope, sizes
from .names import (
    DOWN,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    OUTPUT,
    PRE_FEED,
    PRE_MIXER,
    UP,
    K,
    Names,
    Q,
    Rows,
    V,
    fused_qkv,
    split,
)

ROPE_KEYS = {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}


def gpt_neox(keys: ConfigKeys) -> DecoderSpec:
    """GPT-NeoX: biases everywhere, but in attention by a key."""
    keys = _with_own_names(keys)
    found, norm = sizes(keys), layer_norm(keys)
    has_bias = keys.flag("attention_bias", True)
    layer = LayerSpec(
        mixer=attention(found, has_qkv_bias=has_bias, has_output_bias=has_bias),
        feed=feed(keys, activation="gelu", is_gated=False, has_bias=True),
        pre_mixer=norm,
        pre_feed=norm,
        is_parallel=keys.flag("use_parallel_residual", True),
    )
    ropes = (rope(keys, found, share=0.25),)
    return decoder(keys, found, [layer] * found.num_layers, final_norm=norm, ropes=ropes)


def gpt_neox_japanese(keys: ConfigKeys) -> DecoderSpec:
    """GPT-NeoX Japanese: one after the other, and no bias but that of the last layer's attention."""
    keys = _with_own_names(keys)
    found, norm = sizes(keys), layer_norm(keys)
    size = found.hidden_size * keys.count("intermediate_multiple_size", 4)
    inner = feed(ConfigKeys({**keys.values, "intermediate_size": size}, keys.source), activation="gelu", is_gated=False)
    layer = LayerSpec(mixer=attention(found), feed=inner, pre_mixer=norm, pre_feed=norm)
    last = replace(layer, mixer=attention(found, has_output_bias=True))
    layers, ropes = [layer] * (found.num_layers - 1) + [last], (rope(keys, found, share=1.0),)
    return decoder(keys, found, layers, final_norm=norm, ropes=ropes, is_tied=True)


def _with_own_names(keys: ConfigKeys) -> ConfigKeys:
    """The keys with rotary parameters under their usual names, which these families call otherwise."""
    values = {key: value for key, value in keys.values.items() if key not in ROPE_KEYS}
    return renamed(ConfigKeys(values, keys.source, keys.stored_names), ROPE_KEYS)


def names(spec: DecoderSpec) -> Names:
    """The same parts in both, below the name of the type."""
    layer = f"{spec.family}.layers.*"
    places: Names = {
        EMBEDDING: f"{spec.family}.embed_in",
        PRE_MIXER: f"{layer}.input_layernorm",
        **split(f"{layer}.attention.query_key_value", (Q, K, V), fused_qkv(spec.attention, is_by_group=True)),
        OUTPUT: f"{layer}.attention.dense",
        PRE_FEED: f"{layer}.post_attention_layernorm",
        UP: f"{layer}.mlp.dense_h_to_4h",
        DOWN: f"{layer}.mlp.dense_4h_to_h",
        FINAL_NORM: f"{spec.family}.final_layer_norm",
    }
    if spec.family == "gpt_neox":
        return places
    return {**places, HEAD: "embed_out", f"{OUTPUT}.bias": Rows(f"{layer}.attention.dense_bias", suffix="")}


FAMILIES = {
    "gpt_neox": Family(spec=gpt_neox, names=names, prefix="gpt_neox", older_names={"embed_out": HEAD}),
    "gpt_neox_japanese": Family(spec=gpt_neox_japanese, names=names, prefix="gpt_neox_japanese"),
}
