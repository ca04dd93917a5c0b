"""Tiny random checkpoints of each family, written by transformers, which is also the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.model.tiny_tokenizers import make_tokenizer

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 640,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# What makes each family itself, small enough to matter within a few hundred tokens.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"head_dim": 24, "sliding_window": 32, "tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
}

STYLES = {"llama": "llama3", "mistral": "mistral", "qwen2": "chatml", "qwen3": "chatml"}


def make_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A transformers model with random weights, biases and norms included, large enough to give decided logits."""
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family], **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1, generator=generator)
    return model.to(dtype)


def make_checkpoint(
    family: str,
    path: Path,
    dtype: torch.dtype = torch.float32,
    *,
    max_shard_size: str = "5GB",
    has_tokenizer: bool = True,
    **overrides: Any,
) -> PreTrainedModel:
    """Write a checkpoint of `family` (llama, mistral, qwen2, qwen3) with a small tokenizer; returns the model in it."""
    model = make_model(family, dtype, **overrides)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if has_tokenizer:
        make_tokenizer(STYLES[family], path, model.config.vocab_size)
    return model
