"""What an architecture of GGUF files is, and the keys of config.json that all of them have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from .keys import Config, Factors, Keys
from .recurrent_architectures import Order

SPLIT_QKV = "self_attn.?_proj"  # of one tensor with the rows of queries, keys and values, one behind another
SHARED_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SANDWICH_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One `general.architecture`. `config` adds to the keys that all have."""

    model_type: str
    class_name: str
    config: Callable[[Keys], Config] = lambda keys: {}
    names: Mapping[str, str] = field(default_factory=lambda: SHARED_NAMES)
    rotates_pairs: bool = False  # q and k rows lie in pairs (NORM), in Hugging Face's in halves
    adds_one: bool = False  # norms are stored as 1 + w
    norm: str = "rms_norm_eps"  # the key of the norms' eps
    is_layer_norm: bool = False  # whether the file calls it that of a LayerNorm
    orders: Callable[[Keys], Mapping[str, Order]] = lambda keys: {}  # by stem, of matrices stored in another order
    more_names: Callable[[Keys], Mapping[str, str]] = lambda keys: {}  # that depend on the file


def shared_config(keys: Keys, architecture: Architecture) -> Config:
    """The keys of config.json that every architecture has."""
    kind = "attention.layer_norm_epsilon" if architecture.is_layer_norm else "attention.layer_norm_rms_epsilon"
    num_heads = keys.need("attention.head_count")
    inner, of_experts = keys.most("feed_forward_length"), keys.get("expert_feed_forward_length")
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "hidden_size": keys.need("embedding_length"),
        "intermediate_size": inner or of_experts or keys.need("feed_forward_length"),
        "num_hidden_layers": keys.need("block_count") - keys.get("nextn_predict_layers", 0),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.most("attention.head_count_kv") or num_heads,
        "head_dim": keys.head_dim,
        "max_position_embeddings": keys.need("context_length"),
        "rope_parameters": rope_of(keys),
        architecture.norm: keys.number(kind, 1e-5),
    }


def rope_of(keys: Keys, base: float = 10_000.0) -> Config:
    """The rotation: default, linear, yarn, or frequencies divided by factors that a tensor holds."""
    theta = keys.number("rope.freq_base", base)
    scaling, factor = keys.get("rope.scaling.type"), keys.get("rope.scaling.factor")
    rope: Config = {"rope_type": "default", "rope_theta": theta}
    rotated = keys.get("rope.dimension_count")
    if rotated is not None and rotated != keys.head_dim:
        rope["partial_rotary_factor"] = rotated / keys.head_dim
    if "rope_freqs" in keys.factors:
        return rope | _divided(keys, keys.factors["rope_freqs"], theta)
    if scaling == "linear" and factor not in (None, 0.0, 1.0):
        return rope | {"rope_type": "linear", "factor": float(factor)}
    if scaling == "yarn":
        return rope | _yarn(keys)
    if scaling not in (None, "none", "linear", "longrope"):
        raise ValueError(f"{keys.name}.rope.scaling.type = {scaling!r}: none, linear, yarn and longrope are read")
    return rope


def _yarn(keys: Keys) -> Config:
    """YaRN's stretch, with those of its other numbers that the file has."""
    scaling: Config = {
        "rope_type": "yarn",
        "factor": keys.number("rope.scaling.factor"),
        "original_max_position_embeddings": keys.need("rope.scaling.original_context_length"),
    }
    names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
    found = {name: keys.get(f"rope.scaling.{key}") for key, name in names.items()}
    return scaling | {name: float(f"{value:.7g}") for name, value in found.items() if value is not None}


def _divided(keys: Keys, factors: Factors, theta: float) -> Config:
    """Llama 3's scaling, of which files keep the factors of the frequencies only."""
    guess = {"factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    original = 8192
    if np.allclose(factors, _llama3_factors(len(factors), theta, original, **guess), rtol=1e-5):
        return {"rope_type": "llama3", "original_max_position_embeddings": original, **guess}
    listed = [float(factor) for factor in factors]
    length = keys.need("context_length")  # no sequence is longer, so the long ones are never used
    return {
        "rope_type": "longrope",
        "short_factor": listed,
        "long_factor": listed,
        "attention_factor": 1.0,
        "original_max_position_embeddings": length,
    }


def _llama3_factors(
    count: int, theta: float, original: int, factor: float, low_freq_factor: float, high_freq_factor: float
) -> Factors:
    lengths = 2 * math.pi * theta ** (np.arange(count) / count)
    share = (original / lengths - low_freq_factor) / (high_freq_factor - low_freq_factor)
    smooth = 1 / ((1 - share) / factor + share)
    return np.where(share > 1, 1.0, np.where(share < 0, factor, smooth)).astype(np.float32)
