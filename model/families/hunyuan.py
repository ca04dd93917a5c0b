"""Hunyuan (dense), nanochat and Apertus: norms of q and k behind or before the rotation, feeds without a gate."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config_keys import ConfigKeys
from ..rope_config import RopeConfig, rope_keys
from ..spec import DecoderSpec, EmbeddingSpec, HeadSpec, QkNorm
from .building import Family, biases, decoder, feed, layers_of, rms_norm, rope
from .names import ACTIVATION, DOWN, K_NORM, LAYER, PRE_FEED, PRE_MIXER, Q_NORM, UP, Index, K, Names, Q, Rows
from .reading import Sizes, default_rope, refuse_true, sizes


def hunyuan(keys: ConfigKeys) -> DecoderSpec:
    """Hunyuan: norms of heads behind the rotation."""
    refuse_true(keys, "use_cla")  # keys and values that layers share
    found, norm = sizes(keys), rms_norm(keys, default=1e-5)
    qk_norm = QkNorm(norm=norm, when="after_rope")
    layers = layers_of(found, norm, feed(keys), qk_norm=qk_norm, **biases(keys))
    return decoder(keys, found, layers, final_norm=norm, ropes=(_hunyuan_rope(keys, found),))


def _hunyuan_rope(keys: ConfigKeys, found: Sizes) -> RopeConfig:
    """Rotary positions, where "dynamic" with `alpha` means a larger base for all positions."""
    scaling = rope_keys(keys)
    alpha = scaling.optional_number("alpha")
    if "dynamic" not in (scaling.values.get("rope_type"), scaling.values.get("type")) or not alpha:
        return rope(keys, found)
    if found.head_dim < 4:
        scaling.fail("alpha", f"needs heads of at least 4 numbers, not {found.head_dim}")
    base = scaling.number("rope_theta", keys.number("rope_theta", 1e4))
    theta = base * alpha ** (found.head_dim / (found.head_dim - 2))
    plain = {**keys.values, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    return rope(ConfigKeys(plain, keys.source, keys.stored_names), found)


def hunyuan_names(spec: DecoderSpec) -> Names:
    """Other names of the norms of heads."""
    return {Q_NORM: f"{LAYER}.self_attn.query_layernorm", K_NORM: f"{LAYER}.self_attn.key_layernorm"}


def nanochat(keys: ConfigKeys) -> DecoderSpec:
    """nanochat: norms without weights, also of the embedding and behind the rotation."""
    found, norm = sizes(keys), rms_norm(keys, weight="none", is_exact=True)
    qk_norm = QkNorm(norm=norm, when="after_rope")
    inner = feed(keys, activation="relu2", is_gated=False)
    layers = layers_of(found, norm, inner, qk_norm=qk_norm, **biases(keys))
    is_tied, cap = keys.flag("tie_word_embeddings", False), keys.cap("final_logit_softcapping", 15.0)
    return decoder(
        keys,
        found,
        layers,
        final_norm=norm,
        ropes=(rope(keys, found),),
        embedding=EmbeddingSpec(norm=norm),
        head=HeadSpec(is_tied=is_tied, soft_cap=cap),
    )


def nanochat_names(spec: DecoderSpec) -> Names:
    """Heads rotate the other way round, so their halves change places."""
    attention = spec.attention
    halves = {Q: attention.num_heads, K: attention.num_kv_heads}
    mlp = {UP: f"{LAYER}.mlp.fc1", DOWN: f"{LAYER}.mlp.fc2"}
    return {**{stem: Rows(stem, _swapped(count, attention.head_dim)) for stem, count in halves.items()}, **mlp}


def _swapped(num_heads: int, head_dim: int) -> Index:
    """The rows of heads with the second half of each before the first."""
    rows = np.arange(num_heads * head_dim).reshape(num_heads, 2, head_dim // 2)
    return rows[:, ::-1].reshape(-1)


def apertus(keys: ConfigKeys) -> DecoderSpec:
    """Apertus: norms of heads, a feed by xIELU, whose two numbers are learned in each layer."""
    if keys.values.get("output_vocab_size") not in (None, keys.values.get("vocab_size")):
        keys.fail("output_vocab_size", "an output layer with fewer rows than vocab_size is not supported")
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    keys = default_rope(keys, **scaling, rope_theta=12e6, original_max_position_embeddings=8192)
    found, norm = sizes(keys, max_position=65_536), rms_norm(keys, default=1e-5)
    inner = feed(keys, activation="xielu", is_gated=False)
    layers = layers_of(found, norm, inner, qk_norm=QkNorm(norm=norm), **biases(keys))
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found, theta=12e6),))


def apertus_names(spec: DecoderSpec) -> Names:
    """Other names of norms. xIELU's numbers are stored as before softplus; the second is used with its beta, 1/2."""
    activation = f"{LAYER}.mlp.act_fn"
    return {
        PRE_MIXER: f"{LAYER}.attention_layernorm",
        PRE_FEED: f"{LAYER}.feedforward_layernorm",
        ACTIVATION: (
            Rows(f"{activation}.alpha_p", apply=_softplus),
            Rows(f"{activation}.alpha_n", apply=lambda numbers: 0.5 + _softplus(numbers)),
        ),
    }


def _softplus(numbers: NDArray[Any]) -> NDArray[Any]:
    grown: NDArray[Any] = np.logaddexp(numbers, np.float32(0.0))
    return grown


APERTUS = Family(
    spec=apertus,
    names=apertus_names,
    constants={f"{LAYER}.mlp.act_fn.beta": 0.5, f"{LAYER}.mlp.act_fn.eps": -1e-6},
)
FAMILIES = {
    "apertus": APERTUS,
    "apertus1p5_text": APERTUS,
    "hunyuan_v1_dense": Family(spec=hunyuan, names=hunyuan_names),
    "nanochat": Family(spec=nanochat, names=nanochat_names),
}
