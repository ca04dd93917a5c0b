"""BLOOM, Falcon and MPT: LayerNorm, ungated feeds of four times the hidden size, tied heads; alibi in most.

BLOOM norms its embedding and has biases everywhere; MPT has none. Falcon 7B has one key/value head and adds attention
and feed in parallel with one norm, 40B has groups of heads and two norms; both rotate. Falcon RW has alibi.
"""

from __future__ import annotations

from ...config_keys import ConfigKeys
from ...errors import quoted
from ...spec import DecoderSpec, EmbeddingSpec, FeedSpec, LayerSpec
from ..building import Family, attention, decoder, feed, layer_norm, rope
from ..names import (
    DOWN,
    EMBEDDING,
    EMBEDDING_NORM,
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
from ..reading import refuse_other, refuse_true, renamed, sizes

BLOOM_KEYS = {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "max_position_embeddings": "seq_length"}
MPT_KEYS = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
}
LAYER = "transformer.h.*"


def bloom(keys: ConfigKeys) -> DecoderSpec:
    """BLOOM. A file may leave out how long the sequences of its training were: 2,048 tokens."""
    keys = renamed(keys, {**BLOOM_KEYS, **({"hidden_size": "n_embed"} if keys.values.get("n_embed") else {})})
    refuse_true(keys, "apply_residual_connection_post_layernorm")
    found, norm = sizes(keys, has_plain_heads=True), layer_norm(keys, "layer_norm_epsilon")
    mixer = attention(found, rope=None, has_alibi=True, has_qkv_bias=True, has_output_bias=True)
    inner = FeedSpec(intermediate_size=4 * found.hidden_size, is_gated=False, activation="gelu_tanh", has_bias=True)
    layers = [LayerSpec(mixer=mixer, feed=inner, pre_mixer=norm, pre_feed=norm)] * found.num_layers
    return decoder(keys, found, layers, final_norm=norm, embedding=EmbeddingSpec(norm=norm), is_tied=True)


def mpt(keys: ConfigKeys) -> DecoderSpec:
    """MPT, as transformers knows it: what its own code could do besides is refused."""
    keys = renamed(keys, MPT_KEYS)
    inner_keys = keys.values.get("attn_config") or {}
    if not isinstance(inner_keys, dict):
        keys.fail("attn_config", f"must be an object, not {quoted(inner_keys)}")
    of_attention = ConfigKeys(inner_keys, f"{keys.source}: attn_config")
    refuse_true(of_attention, "clip_qkv", "qk_ln", "prefix_lm", "attn_uses_sequence_id")
    refuse_other(of_attention, alibi=True, alibi_bias_max=8, attn_type="multihead_attention")
    refuse_other(keys, expansion_ratio=4, no_bias=True)
    if keys.values.get("norm_type") not in (None, "low_precision_layernorm", "layernorm"):
        keys.fail("norm_type", f"{quoted(keys.values['norm_type'])} is not supported; supported: layernorm")
    refuse_true(keys, "logit_scale")
    found, norm = sizes(keys, has_plain_heads=True), layer_norm(keys, "layer_norm_epsilon", has_bias=False)
    scale = of_attention.number("softmax_scale", found.head_dim**-0.5)
    layer = LayerSpec(
        mixer=attention(found, scale=scale, rope=None, has_alibi=True),
        feed=FeedSpec(intermediate_size=4 * found.hidden_size, is_gated=False, activation="gelu"),
        pre_mixer=norm,
        pre_feed=norm,
    )
    return decoder(keys, found, [layer] * found.num_layers, final_norm=norm, is_tied=True)


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


def bloom_names(spec: DecoderSpec) -> Names:
    """BLOOM's names; fused rows by head."""
    return {
        EMBEDDING: "transformer.word_embeddings",
        EMBEDDING_NORM: "transformer.word_embeddings_layernorm",
        PRE_MIXER: f"{LAYER}.input_layernorm",
        **split(f"{LAYER}.self_attention.query_key_value", (Q, K, V), fused_qkv(spec.attention, is_by_group=True)),
        OUTPUT: f"{LAYER}.self_attention.dense",
        PRE_FEED: f"{LAYER}.post_attention_layernorm",
        UP: f"{LAYER}.mlp.dense_h_to_4h",
        DOWN: f"{LAYER}.mlp.dense_4h_to_h",
        FINAL_NORM: "transformer.ln_f",
    }


def mpt_names(spec: DecoderSpec) -> Names:
    """MPT's names."""
    layer = "transformer.blocks.*"
    return {
        EMBEDDING: "transformer.wte",
        PRE_MIXER: f"{layer}.norm_1",
        **split(f"{layer}.attn.Wqkv", (Q, K, V), fused_qkv(spec.attention)),
        OUTPUT: f"{layer}.attn.out_proj",
        PRE_FEED: f"{layer}.norm_2",
        UP: f"{layer}.ffn.up_proj",
        DOWN: f"{layer}.ffn.down_proj",
        FINAL_NORM: "transformer.norm_f",
    }


def falcon_names(spec: DecoderSpec) -> Names:
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


FAMILIES = {
    "bloom": Family(spec=bloom, names=bloom_names, prefix="transformer"),
    "falcon": Family(spec=falcon, names=falcon_names, prefix="transformer"),
    "mpt": Family(spec=mpt, names=mpt_names, prefix="transformer"),
}
