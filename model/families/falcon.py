"""Falcon: 7B with one key/value head and one norm, 40B with groups of heads and two norms, RW with alibi."""

from __future__ import annotations

from ..config_keys import ConfigKeys
from ..spec import DecoderSpec, LayerSpec
from .building import Family, attention, decoder, feed, layer_norm, renamed, rope, sizes
from .names import (
    DOWN,
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    PRE_FEED,
    PRE_MIXER,
    UP,
    K,
    Names,
    Q,
    V,
    fused_qkv,
    split,
)

LAYER = "transformer.h.*"


def falcon(keys: ConfigKeys) -> DecoderSpec:
    """Falcon. `new_decoder_architecture` is that of the 40B one."""
    keys = renamed(keys, {"hidden_size": "n_embed"} if keys.values.get("n_embed") else {})
    is_new, is_parallel = keys.flag("new_decoder_architecture", False), keys.flag("parallel_attn", True)
    num_norms = keys.count("num_ln_in_parallel_attn", 2 if is_new else 1, most=2)
    if is_new and not is_parallel:
        keys.fail("parallel_attn", "must be true with new_decoder_architecture = true")
    if num_norms == 2 and not is_new:
        keys.fail("num_ln_in_parallel_attn", "must be 1 without new_decoder_architecture = true, not 2")
    found = sizes(_with_kv_heads(keys, is_new=is_new))
    norm, has_bias, has_alibi = (
        layer_norm(keys, "layer_norm_epsilon"),
        keys.flag("bias", False),
        keys.flag("alibi", False),
    )
    layer = LayerSpec(
        mixer=attention(
            found,
            rope=None if has_alibi else 0,
            has_alibi=has_alibi,
            alibi_scale=found.head_dim**-0.5,
            is_alibi_rounded=has_alibi,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
        ),
        feed=feed(
            keys,
            activation="gelu",
            key="activation",
            size="ffn_hidden_size",
            inner=4 * found.hidden_size,
            is_gated=False,
            has_bias=has_bias,
        ),
        pre_mixer=norm,
        pre_feed=None if is_parallel and num_norms == 1 else norm,
        is_parallel=is_parallel,
    )
    ropes = () if has_alibi else (rope(keys, found),)
    return decoder(keys, found, [layer] * found.num_layers, final_norm=norm, ropes=ropes, is_tied=True)


def _with_kv_heads(keys: ConfigKeys, *, is_new: bool) -> ConfigKeys:
    """The keys with the number of key/value heads in force: only the newer architecture has a key for it."""
    if is_new:
        return renamed(keys, {"num_key_value_heads": "num_kv_heads"})
    num_kv_heads = 1 if keys.flag("multi_query", True) else None  # None: as many as heads
    return ConfigKeys({**keys.values, "num_key_value_heads": num_kv_heads}, keys.source, keys.stored_names)


def names(spec: DecoderSpec) -> Names:
    """Fused rows are [q; k; v] with one key/value head, and by key/value head otherwise."""
    norms = [f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm"]
    if spec.layers[0].is_parallel and spec.layers[0].pre_feed is not None:
        norms = [f"{LAYER}.ln_attn", f"{LAYER}.ln_mlp"]
    rows = fused_qkv(spec.attention, is_by_group=spec.num_kv_heads > 1)
    return {
        EMBEDDING: "transformer.word_embeddings",
        PRE_MIXER: norms[0],
        **split(f"{LAYER}.self_attention.query_key_value", (Q, K, V), rows),
        OUTPUT: f"{LAYER}.self_attention.dense",
        PRE_FEED: norms[1],
        UP: f"{LAYER}.mlp.dense_h_to_4h",
        DOWN: f"{LAYER}.mlp.dense_4h_to_h",
        FINAL_NORM: "transformer.ln_f",
    }


FAMILIES = {"falcon": Family(spec=falcon, names=names, prefix="transformer")}
