"""Tiny models of types that no family here describes, in memory, with random numbers in all that is learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from millrace.model.fallback.attention_interface import IMPLEMENTATION
from millrace.model.fallback.transformers_decoder import TransformersModel
from millrace.model.spec import DecoderSpec

VOCAB_SIZE, LONGEST = 96, 256
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
KINDS: dict[str, dict[str, Any]] = {  # by model type; each has what one of the others lacks
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {  # sinks, and windows in the first layer
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phimoe": {"num_local_experts": 4, "sliding_window": 24},  # its window is in the mask only
    "llama4_text": {  # chunks, which are in the mask only, and layers without rotary positions
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "attention_chunk_size": 32,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
    },
    "deepseek_v3": LATENT,  # values smaller than keys
    "gemma3n_text": {  # the last layer reads the cache of the one before the last of its kind
        "num_hidden_layers": 4,
        "head_dim": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
    },
    "diffllama": {},  # each module attends twice, with other values
}


def make_config(model_type: str, **keys: Any) -> PreTrainedConfig:
    """A configuration of the type."""
    known = set(CONFIG_MAPPING[model_type]().to_dict())
    shape = {key: value for key, value in SHAPE.items() if key in known}
    return CONFIG_MAPPING[model_type](**{**shape, **KINDS.get(model_type, {}), **keys})


def make_model(model_type: str, *, dtype: torch.dtype = torch.float32, **keys: Any) -> PreTrainedModel:
    """A model of the type, whose attention is on a paged cache."""
    config = make_config(model_type, **keys)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=IMPLEMENTATION).eval()
    draws = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.from_numpy(draws.standard_normal(parameter.shape, np.float32))
            if parameter.dim() < 2:
                parameter += 0.3 * noise
            else:
                parameter.copy_(noise * 1.5 / min(parameter.shape[-2:]) ** 0.5)
    made: PreTrainedModel = model.to(dtype)
    return made


def loaded(model: PreTrainedModel) -> TransformersModel:
    """The model as it is loaded for serving."""
    spec = DecoderSpec(
        family=model.config.model_type,
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        layers=(),
        ropes=(),
        max_position_embeddings=LONGEST,
        dtype="float32",
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    return TransformersModel(model, spec)
