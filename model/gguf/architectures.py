"""The architectures of GGUF files that are served: their keys as a config.json, and their tensors' Hugging Face names.

Source: what llama.cpp's converter writes (conversion/*.py in its repository). An `Architecture` undoes it: names, the
order of rotated rows, norms stored as 1 + w. What a file does not say, as the base of Gemma 3's windowed layers, is
here with the number that all published models have.
"""

from __future__ import annotations

import math

from . import dense_architectures as dense
from . import expert_architectures as moe
from . import gpt_architectures as gpt
from . import latent_architectures as latent
from . import recurrent_architectures as recurrent
from .architecture import SANDWICH_NAMES, SHARED_NAMES, Architecture, rope_of
from .dense_architectures import some_of_each_head, stretched
from .keys import Config, Keys

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
    return {
        **stretched(keys),
        "sliding_window": keys.get("attention.sliding_window") or None,
        "hidden_act": "silu",
    }


def _gpt_oss(keys: Keys) -> Config:
    rope = rope_of(keys)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # its ramp is not rounded, which a file does not say
    return {**moe.gpt_oss(keys), "rope_parameters": rope}


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
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", _olmo2, dense.BEHIND_NAMES),
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
        lambda keys: {**recurrent.qwen_next_moe(keys), "rope_parameters": some_of_each_head(keys)},
        SHARED_NAMES | recurrent.QWEN_NAMES,
        adds_one=True,
    ),
    "qwen35": Architecture(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        lambda keys: {**recurrent.qwen_next(keys), "rope_parameters": some_of_each_head(keys)},
        SHARED_NAMES | recurrent.QWEN_NAMES,
        adds_one=True,
        orders=recurrent.tiled_values,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        lambda keys: {**recurrent.qwen_next_moe(keys), "rope_parameters": some_of_each_head(keys)},
        SHARED_NAMES | recurrent.QWEN_NAMES,
        adds_one=True,
        orders=recurrent.tiled_values,
    ),
    "glm4moe": Architecture("glm4_moe", "Glm4MoeForCausalLM", moe.glm4_moe, SHARED_NAMES | moe.GLM_NAMES),
    "dots1": Architecture("dots1", "Dots1ForCausalLM", moe.dots1, SHARED_NAMES | moe.EXPERT_NAMES),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", moe.ernie_moe, SHARED_NAMES | moe.EXPERT_NAMES
    ),
    "qwen3vlmoe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", moe.qwen3_moe, SHARED_NAMES | moe.EXPERT_NAMES),
    **dense.ARCHITECTURES,
    **gpt.ARCHITECTURES,
}
FACTOR_TENSORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
