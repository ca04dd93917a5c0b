"""The architectures of GGUF files that are served: their keys as a config.json, and their tensors' Hugging Face names.

Source: what llama.cpp's converter writes (conversion/*.py in its repository). An `Architecture` undoes it: names, the
order of rotated rows, norms stored as 1 + w. What a file does not say, as the base of Gemma 3's windowed layers, is
here with the number that all published models have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from . import expert_architectures as moe
from . import latent_architectures as latent
from . import recurrent_architectures as recurrent
from .keys import Config, Factors, Keys
from .recurrent_architectures import Order

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


# -- what single architectures add


def _llama(keys: Keys) -> Config:
    return moe.mixtral(keys) if keys.get("expert_count", 0) else {"hidden_act": "silu"}


def _mistral3(keys: Keys) -> Config:
    rope = rope_of(keys)
    if rope["rope_type"] != "yarn":
        return {"rope_parameters": rope}
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    rope |= {"mscale": 1.0, "mscale_all_dim": multiplier}  # other architectures store a tenth of it
    rope["llama_4_scaling_beta"] = keys.number("attention.temperature_scale", 0.0)
    return {"rope_parameters": rope}


def _qwen2(keys: Keys) -> Config:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _gemma(keys: Keys) -> Config:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(keys: Keys) -> Config:
    layers = keys.need("block_count")
    # the 27B model alone divides by its width for each head; the others by the head size
    scalar = keys.need("embedding_length") // keys.need("attention.head_count") if layers == 46 else keys.head_dim
    return _gemma(keys) | {
        "sliding_window": keys.get("attention.sliding_window", 4096),
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)],
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": scalar,
    }


def _gemma3(keys: Keys) -> Config:
    """A file has neither the base of the windowed layers' rotation nor which layers those are: five of six."""
    layers = keys.need("block_count")
    whole = rope_of(keys, 1_000_000.0)
    windowed = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)}
    kinds = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(layers)]
    cap = keys.get("final_logit_softcapping")
    scalar = keys.need("embedding_length") // keys.need("attention.head_count") if layers == 62 else keys.head_dim
    return _gemma(keys) | {
        "sliding_window": keys.get("attention.sliding_window"),
        "layer_types": kinds if keys.get("attention.sliding_window") else ["full_attention"] * layers,
        "rope_parameters": {"full_attention": whole, "sliding_attention": windowed},
        "query_pre_attn_scalar": scalar,  # of the 27B model, which has 62 layers, the width for each head
        **({} if cap is None else {"final_logit_softcapping": float(cap)}),
    }


def _phi3(keys: Keys) -> Config:
    rope = rope_of(keys)
    original = keys.get("rope.scaling.original_context_length", keys.need("context_length"))
    if "rope_factors_long" in keys.factors:
        rope |= {
            "rope_type": "longrope",
            "short_factor": [float(factor) for factor in keys.factors["rope_factors_short"]],
            "long_factor": [float(factor) for factor in keys.factors["rope_factors_long"]],
        }
    return {
        "rope_parameters": rope,
        "original_max_position_embeddings": original,
        "sliding_window": keys.get("attention.sliding_window") or None,
        "hidden_act": "silu",
    }


def _gpt_oss(keys: Keys) -> Config:
    rope = rope_of(keys)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # its ramp is not rounded, which a file does not say
    return {**moe.gpt_oss(keys), "rope_parameters": rope}


def _some_of_each_head(keys: Keys) -> Config:
    """The rotation, which says how much of a head rotates even if all of it does."""
    rotated = keys.get("rope.dimension_count", keys.head_dim)
    return {**rope_of(keys), "partial_rotary_factor": rotated / keys.head_dim}


def _granite_moe(keys: Keys) -> Config:
    return {**_granite(keys), **moe.granite_moe(keys)}


def _granite(keys: Keys) -> Config:
    return {
        "attention_multiplier": keys.number("attention.scale", 1.0 / math.sqrt(keys.head_dim)),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def _smollm3(keys: Keys) -> Config:
    """No rotation in every fourth layer, which a file does not say."""
    layers = keys.need("block_count")
    return {"no_rope_layers": [int(layer % 4 != 3) for layer in range(layers)], "use_sliding_window": False}


def _olmo2(keys: Keys) -> Config:
    if not keys.get("attention.sliding_window"):
        return {}
    kinds = keys.need("attention.sliding_window_pattern")
    whole = rope_of(keys)  # of layers without a window; the others' positions are never stretched
    windowed = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", whole["rope_theta"])}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "rope_parameters": {"full_attention": whole, "sliding_attention": windowed},
        "sliding_window": keys.need("attention.sliding_window"),
        "layer_types": ["sliding_attention" if kind else "full_attention" for kind in kinds],
    }


def _cohere(keys: Keys) -> Config:
    return {"logit_scale": keys.number("logit_scale"), "tie_word_embeddings": True}


def _cohere2(keys: Keys) -> Config:
    layers = keys.need("block_count")
    return _cohere(keys) | {
        "sliding_window": keys.need("attention.sliding_window"),
        "layer_types": ["full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(layers)],
    }


def _starcoder2(keys: Keys) -> Config:
    return {"use_bias": True, "hidden_act": "gelu_pytorch_tanh", "sliding_window": None}


OLMO2_NAMES = {
    **{name: other for name, other in SHARED_NAMES.items() if name not in ("attn_norm", "ffn_norm")},
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
COHERE_NAMES = {name: other for name, other in SHARED_NAMES.items() if name != "ffn_norm"}
STARCODER2_NAMES = SHARED_NAMES | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
PHI3_NAMES = SHARED_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
GEMMA_NAMES = SHARED_NAMES | SANDWICH_NAMES

ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _llama, SHARED_NAMES | moe.MIXTRAL_NAMES, rotates_pairs=True),
    "mistral3": Architecture("ministral3", "Ministral3ForCausalLM", _mistral3, rotates_pairs=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _qwen2),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _qwen2),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _gemma, adds_one=True),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _gemma2, GEMMA_NAMES, adds_one=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _gemma3, GEMMA_NAMES, adds_one=True),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _phi3, PHI3_NAMES),
    "granite": Architecture("granite", "GraniteForCausalLM", _granite, rotates_pairs=True),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _smollm3, rotates_pairs=True),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", _olmo2, OLMO2_NAMES),
    "command-r": Architecture(
        "cohere", "CohereForCausalLM", _cohere, COHERE_NAMES, norm="layer_norm_eps", is_layer_norm=True
    ),
    "cohere2": Architecture(
        "cohere2", "Cohere2ForCausalLM", _cohere2, COHERE_NAMES, norm="layer_norm_eps", is_layer_norm=True
    ),
    "starcoder2": Architecture(
        "starcoder2", "Starcoder2ForCausalLM", _starcoder2, STARCODER2_NAMES, norm="norm_epsilon", is_layer_norm=True
    ),
    "seed_oss": Architecture(
        "seed_oss",
        "SeedOssForCausalLM",
        lambda keys: {"attention_bias": True, "attention_out_bias": False},
        SHARED_NAMES | {"post_attention_norm": "post_attention_layernorm"},
    ),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", moe.qwen2_moe, SHARED_NAMES | moe.EXPERT_NAMES),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", moe.qwen3_moe, SHARED_NAMES | moe.EXPERT_NAMES),
    "olmoe": Architecture("olmoe", "OlmoeForCausalLM", moe.olmoe, SHARED_NAMES | moe.EXPERT_NAMES),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", _gpt_oss, SHARED_NAMES | moe.GPT_OSS_NAMES),
    "granitemoe": Architecture(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        _granite_moe,
        SHARED_NAMES | moe.GRANITE_NAMES,
        rotates_pairs=True,
    ),
    "gemma4": Architecture("gemma4_text", "Gemma4ForCausalLM", latent.gemma4, GEMMA_NAMES | latent.GEMMA4_NAMES),
    "deepseek2": Architecture(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        lambda keys: latent.deepseek2(keys, rope_of(keys)),
        SHARED_NAMES | latent.LATENT_NAMES,
    ),
    "lfm2": Architecture(
        "lfm2", "Lfm2ForCausalLM", recurrent.lfm2, SHARED_NAMES | recurrent.LFM2_NAMES, norm="norm_eps"
    ),
    "lfm2moe": Architecture(
        "lfm2_moe", "Lfm2MoeForCausalLM", recurrent.lfm2_moe, SHARED_NAMES | recurrent.LFM2_NAMES, norm="norm_eps"
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        lambda keys: {**_granite(keys), **recurrent.granite_hybrid(keys)},
        SHARED_NAMES | recurrent.GRANITE_H_NAMES,
        rotates_pairs=True,
    ),
    **{
        name: Architecture(
            "nemotron_h",
            "NemotronHForCausalLM",
            recurrent.nemotron_h,
            SHARED_NAMES | recurrent.NEMOTRON_H_NAMES,
            rotates_pairs=True,
            norm="layer_norm_epsilon",
            is_layer_norm=True,
        )
        for name in ("nemotron_h", "nemotron_h_moe")
    },
    "qwen3next": Architecture(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        lambda keys: {**recurrent.qwen_next_moe(keys), "rope_parameters": _some_of_each_head(keys)},
        SHARED_NAMES | recurrent.QWEN_NAMES,
        adds_one=True,
    ),
    "qwen35": Architecture(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        lambda keys: {**recurrent.qwen_next(keys), "rope_parameters": _some_of_each_head(keys)},
        SHARED_NAMES | recurrent.QWEN_NAMES,
        adds_one=True,
        orders=recurrent.tiled_values,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        lambda keys: {**recurrent.qwen_next_moe(keys), "rope_parameters": _some_of_each_head(keys)},
        SHARED_NAMES | recurrent.QWEN_NAMES,
        adds_one=True,
        orders=recurrent.tiled_values,
    ),
    "glm4moe": Architecture("glm4_moe", "Glm4MoeForCausalLM", moe.glm4_moe, SHARED_NAMES | moe.GLM_NAMES),
}
FACTOR_TENSORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
