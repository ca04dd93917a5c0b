"""Architectures of GGUF files without experts that are Llama's but for norms, rotations, multipliers or a feed.

Several have no family of their own: a file of InternLM 2 or Baichuan 7B holds what Llama's does, and one of MiniCPM
what Granite's does.
"""

from __future__ import annotations

import math

import numpy as np

from .architecture import SHARED_NAMES, SPLIT_QKV, Architecture, rope_of
from .keys import Config, Keys
from .latent_architectures import LATENT_NAMES
from .recurrent_architectures import Order

GLM_NAMES = {
    **SHARED_NAMES,
    "attn_qkv": SPLIT_QKV,
    "ffn_up": "mlp.gate_up_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_EXAONE = "transformer.h.{}"
EXAONE_NAMES = {
    "token_embd": "transformer.wte",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": f"{_EXAONE}.ln_1",
    **{f"attn_{name}": f"{_EXAONE}.attn.attention.{name}_proj" for name in "qkv"},
    "attn_output": f"{_EXAONE}.attn.attention.out_proj",
    "ffn_norm": f"{_EXAONE}.ln_2",
    "ffn_gate": f"{_EXAONE}.mlp.c_fc_0",
    "ffn_up": f"{_EXAONE}.mlp.c_fc_1",
    "ffn_down": f"{_EXAONE}.mlp.c_proj",
}
# norms behind attention and feed instead of before them
BEHIND_NAMES = {
    **{name: other for name, other in SHARED_NAMES.items() if name not in ("attn_norm", "ffn_norm")},
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
HUNYUAN_NAMES = SHARED_NAMES | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}


def some_of_each_head(keys: Keys) -> Config:
    """The rotation, which says how much of a head rotates even if all of it does."""
    rotated = keys.get("rope.dimension_count", keys.head_dim)
    return {**rope_of(keys), "partial_rotary_factor": rotated / keys.head_dim}


def has_qkv_bias(keys: Keys) -> bool:
    """Whether the projections of attention's input have biases."""
    return any(f"blk.0.{name}.bias" in keys.tensors for name in ("attn_q", "attn_qkv"))


def _glm(keys: Keys) -> Config:
    return {"rope_parameters": some_of_each_head(keys), "attention_bias": has_qkv_bias(keys)}


def _in_pairs_again(keys: Keys) -> dict[str, Order]:
    """Of GLM-4V, whose rows are stored as halves that rotate: as pairs, which its checkpoint has."""
    if not keys.get("rope.dimension_sections"):
        return {}
    dim, heads = keys.head_dim, keys.need("attention.head_count")
    rotated = int(keys.get("rope.dimension_count", dim))
    counts = {"attn_q": heads, "attn_k": keys.most("attention.head_count_kv") or heads}
    head = np.concatenate([np.arange(rotated).reshape(2, -1).T.reshape(-1), np.arange(rotated, dim)])
    return {name: Order((np.arange(count)[:, None] * dim + head).reshape(-1)) for name, count in counts.items()}


def _exaone(keys: Keys) -> Config:
    """Its converter calls the eps of the RMS norms that of LayerNorm, or not."""
    eps = keys.number("attention.layer_norm_epsilon", 1e-5)
    return {"rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", eps)}


def _exaone4(keys: Keys) -> Config:
    """Older files do not say which layers have the window; the model with 64 layers has one in any case."""
    layers = keys.need("block_count") - keys.get("nextn_predict_layers", 0)
    window = keys.get("attention.sliding_window", 4096 if layers == 64 else None)
    if not window:
        return {"sliding_window": None}
    pattern = keys.get("attention.sliding_window_pattern")
    listed = pattern if isinstance(pattern, list) else [(layer + 1) % (pattern or 4) != 0 for layer in range(layers)]
    kinds = ["sliding_attention" if is_on else "full_attention" for is_on in listed[:layers]]
    return {"sliding_window": window, "layer_types": kinds}


def _minicpm(keys: Keys) -> Config:
    """Granite's multipliers. Files that lack them are of the first MiniCPM, with 2 billion parameters."""
    layers, hidden = keys.need("block_count"), keys.need("embedding_length")
    return {
        "attention_multiplier": keys.head_dim**-0.5,
        "embedding_multiplier": keys.number("embedding_scale", 12.0),
        "residual_multiplier": keys.number("residual_scale", 1.4 / math.sqrt(layers)),
        "logits_scaling": keys.number("logit_scale", hidden / 256),
        **stretched(keys),
    }


def stretched(keys: Keys) -> Config:
    """The rotation, with the factors of long sequences where the file has them."""
    rope = rope_of(keys)
    original = keys.get("rope.scaling.original_context_length", keys.need("context_length"))
    if "rope_factors_long" in keys.factors:
        rope |= {
            "rope_type": "longrope",
            "short_factor": [float(factor) for factor in keys.factors["rope_factors_short"]],
            "long_factor": [float(factor) for factor in keys.factors["rope_factors_long"]],
        }
    return {"rope_parameters": rope, "original_max_position_embeddings": original}


def _minicpm3(keys: Keys) -> Config:
    """Its multipliers are in no file. The rotated part of a head is rotated whole."""
    rotated = keys.need("rope.dimension_count")
    rope = stretched(keys)
    rope["rope_parameters"].pop("partial_rotary_factor", None)
    return {
        **rope,
        "head_dim": None,
        "num_key_value_heads": keys.need("attention.head_count"),
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "kv_lora_rank": keys.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys.need("attention.key_length") - rotated,
    }


def _baichuan(keys: Keys) -> Config:
    if keys.need("block_count") == 40:
        raise ValueError("baichuan.block_count = 40: the 13B model, whose positions are by alibi, is not read; 7B is")
    return {"hidden_act": "silu"}


def _olmo(keys: Keys) -> Config:
    return {"clip_qkv": keys.get("attention.clamp_kqv") or None}


ARCHITECTURES = {
    "glm4": Architecture("glm4", "Glm4ForCausalLM", _glm, GLM_NAMES, orders=_in_pairs_again),
    "chatglm": Architecture("glm", "GlmForCausalLM", _glm, GLM_NAMES),
    "exaone": Architecture("exaone", "ExaoneForCausalLM", _exaone, EXAONE_NAMES),
    "exaone4": Architecture("exaone4", "Exaone4ForCausalLM", _exaone4, BEHIND_NAMES),
    "ernie4_5": Architecture(
        "ernie4_5", "Ernie4_5ForCausalLM", lambda keys: {"use_bias": has_qkv_bias(keys), "attention_bias": False}
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", names=HUNYUAN_NAMES),
    "minicpm": Architecture("granite", "GraniteForCausalLM", _minicpm, rotates_pairs=True),
    "minicpm3": Architecture("minicpm3", "MiniCPM3ForCausalLM", _minicpm3, SHARED_NAMES | LATENT_NAMES),
    "internlm2": Architecture("llama", "LlamaForCausalLM", rotates_pairs=True),
    "baichuan": Architecture("llama", "LlamaForCausalLM", _baichuan, rotates_pairs=True),
    "arcee": Architecture("arcee", "ArceeForCausalLM", lambda keys: {"hidden_act": "relu2"}, rotates_pairs=True),
    "olmo": Architecture("olmo", "OlmoForCausalLM", _olmo, rotates_pairs=True),
    "qwen2vl": Architecture("qwen2", "Qwen2ForCausalLM", lambda keys: {"use_sliding_window": False}),
    "qwen3vl": Architecture("qwen3", "Qwen3ForCausalLM", lambda keys: {"use_sliding_window": False}),
}
