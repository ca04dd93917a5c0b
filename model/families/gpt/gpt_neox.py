"""Descendants of GPT with rotary positions: GPT-NeoX, with Pythia, its Japanese sibling, GPT-J and CodeGen.

LayerNorm, ungated feeds, rotary positions on a part of each head. GPT-NeoX adds attention and feed in parallel, each
with a norm of its own, unless `use_parallel_residual` is false. GPT-J and CodeGen have one norm for both, rotate
neighbours, and have a bias in their output layer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...config_keys import ConfigKeys
from ...errors import quoted
from ...rope_config import RopeConfig
from ...spec import AttentionSpec, DecoderSpec, HeadSpec, LayerSpec
from ..building import Family, attention, decoder, feed, layer_norm, rope
from ..names import (
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
    halves,
    split,
)
from ..reading import renamed, sizes
from .gpt2 import GPT_KEYS
from .gpt2 import LAYER as GPT_LAYER

ROPE_KEYS = {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}
SHARDS = 4  # in which CodeGen's fused projection is stored, [q; v; k] each


def gpt_neox(keys: ConfigKeys) -> DecoderSpec:
    """GPT-NeoX: biases everywhere, but in attention by a key."""
    keys = _with_own_names(keys)
    found, norm = sizes(keys, has_plain_heads=True), layer_norm(keys)
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
    found, norm = sizes(keys, has_plain_heads=True), layer_norm(keys)
    size = found.hidden_size * keys.count("intermediate_multiple_size", 4)
    inner = feed(ConfigKeys({**keys.values, "intermediate_size": size}, keys.source), activation="gelu", is_gated=False)
    layer = LayerSpec(mixer=attention(found), feed=inner, pre_mixer=norm, pre_feed=norm)
    last = replace(layer, mixer=attention(found, has_output_bias=True))
    layers, ropes = [layer] * (found.num_layers - 1) + [last], (rope(keys, found, share=1.0),)
    return decoder(keys, found, layers, final_norm=norm, ropes=ropes, is_tied=True)


def _with_own_names(keys: ConfigKeys) -> ConfigKeys:
    """The keys with rotary parameters under their usual names, which these families call otherwise."""
    if keys.values.get("head_dim") is not None:
        keys.refuse("head_dim", f"{quoted(keys.values['head_dim'])} is not supported, as only the positions heed it")
    values = {key: value for key, value in keys.values.items() if key not in ROPE_KEYS}
    return renamed(ConfigKeys(values, keys.source, keys.stored_names), ROPE_KEYS)


def gpt_neox_names(spec: DecoderSpec) -> Names:
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


def gptj(keys: ConfigKeys) -> DecoderSpec:
    """Either: they differ in names only."""
    keys = renamed(keys, GPT_KEYS)
    found, norm = sizes(keys, has_plain_heads=True), layer_norm(keys, "layer_norm_epsilon")
    rotary_dim = keys.count("rotary_dim", None if keys.is_null("rotary_dim") else 64)
    if rotary_dim % 2 or rotary_dim > found.head_dim:
        keys.fail("rotary_dim", f"must be even and at most {found.head_dim}, the size of a head, not {rotary_dim}")
    if keys.values["model_type"] == "codegen" and found.hidden_size % SHARDS:
        keys.fail("hidden_size", f"must be a multiple of {SHARDS}, not {found.hidden_size}")
    inner = feed(
        keys,
        activation="gelu_new",
        key="activation_function",
        size="n_inner",
        inner=4 * found.hidden_size,
        is_gated=False,
        has_bias=True,
    )
    layer = LayerSpec(mixer=attention(found), feed=inner, pre_mixer=norm, pre_feed=None, is_parallel=True)
    positions = RopeConfig(dim=rotary_dim, original_max_position=found.max_position)
    head = HeadSpec(is_tied=keys.flag("tie_word_embeddings", False), has_bias=True)
    return decoder(keys, found, [layer] * found.num_layers, final_norm=norm, ropes=(positions,), head=head)


def gptj_names(spec: DecoderSpec) -> Names:
    """GPT-J's names, and CodeGen's but for its fused projection."""
    attention, order = spec.attention, halves(spec.num_heads, spec.head_dim, spec.ropes[0].dim)
    places: Names = {
        EMBEDDING: "transformer.wte",
        PRE_MIXER: f"{GPT_LAYER}.ln_1",
        OUTPUT: f"{GPT_LAYER}.attn.out_proj",
        UP: f"{GPT_LAYER}.mlp.fc_in",
        DOWN: f"{GPT_LAYER}.mlp.fc_out",
        FINAL_NORM: "transformer.ln_f",
    }
    if spec.family == "codegen":
        q, k, v = _in_shards(attention)
        return {**places, **split(f"{GPT_LAYER}.attn.qkv_proj", (Q, K, V), (q[order], k[order], v))}
    return {
        **places,
        Q: Rows(f"{GPT_LAYER}.attn.q_proj", order),
        K: Rows(f"{GPT_LAYER}.attn.k_proj", order),
        V: f"{GPT_LAYER}.attn.v_proj",
    }


def _in_shards(attention: AttentionSpec) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The rows of CodeGen's queries, keys and values."""
    size = attention.num_heads * attention.head_dim
    rows = np.arange(3 * size).reshape(SHARDS, 3, size // SHARDS)
    q, v, k = (rows[:, part].reshape(-1) for part in range(3))
    return q, k, v


FAMILIES = {
    "codegen": Family(spec=gptj, names=gptj_names, prefix="transformer"),
    "gpt_neox": Family(spec=gpt_neox, names=gpt_neox_names, prefix="gpt_neox", older_names={"embed_out": HEAD}),
    "gpt_neox_japanese": Family(spec=gpt_neox_japanese, names=gpt_neox_names, prefix="gpt_neox_japanese"),
    "gptj": Family(spec=gptj, names=gptj_names, prefix="transformer"),
}
