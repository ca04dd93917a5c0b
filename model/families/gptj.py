"""GPT-J and CodeGen: parallel blocks with one LayerNorm, neighbours that rotate, a head with a bias."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..config_keys import ConfigKeys
from ..rope_config import RopeConfig
from ..spec import AttentionSpec, DecoderSpec, HeadSpec, LayerSpec
from .building import Family, attention, decoder, feed, layer_norm, renamed, sizes
from .gpt2 import GPT_KEYS, LAYER
from .names import DOWN, EMBEDDING, FINAL_NORM, OUTPUT, PRE_MIXER, UP, K, Names, Q, Rows, V, halves, split

SHARDS = 4  # in which CodeGen's fused projection is stored, [q; v; k] each


def gptj(keys: ConfigKeys) -> DecoderSpec:
    """Either: they differ in names only."""
    keys = renamed(keys, GPT_KEYS)
    found, norm = sizes(keys), layer_norm(keys, "layer_norm_epsilon")
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


def names(spec: DecoderSpec) -> Names:
    """GPT-J's names, and CodeGen's but for its fused projection."""
    attention, order = spec.attention, halves(spec.num_heads, spec.head_dim, spec.ropes[0].dim)
    places: Names = {
        EMBEDDING: "transformer.wte",
        PRE_MIXER: f"{LAYER}.ln_1",
        OUTPUT: f"{LAYER}.attn.out_proj",
        UP: f"{LAYER}.mlp.fc_in",
        DOWN: f"{LAYER}.mlp.fc_out",
        FINAL_NORM: "transformer.ln_f",
    }
    if spec.family == "codegen":
        q, k, v = _in_shards(attention)
        return {**places, **split(f"{LAYER}.attn.qkv_proj", (Q, K, V), (q[order], k[order], v))}
    return {
        **places,
        Q: Rows(f"{LAYER}.attn.q_proj", order),
        K: Rows(f"{LAYER}.attn.k_proj", order),
        V: f"{LAYER}.attn.v_proj",
    }


def _in_shards(attention: AttentionSpec) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The rows of CodeGen's queries, keys and values."""
    size = attention.num_heads * attention.head_dim
    rows = np.arange(3 * size).reshape(SHARDS, 3, size // SHARDS)
    q, v, k = (rows[:, part].reshape(-1) for part in range(3))
    return q, k, v


FAMILIES = {
    "gptj": Family(spec=gptj, names=names, prefix="transformer"),
    "codegen": Family(spec=gptj, names=names, prefix="transformer"),
}
