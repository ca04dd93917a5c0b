"""Checkpoints with a real model's shape and random weights, for timing: every tensor has its true size and dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
}


def make_checkpoint(shape: str, folder: Path, dtype: str = "bfloat16", seed: int = 0) -> Path:
    """Writes the checkpoint to `folder`, with a byte-level tokenizer whose first 256 ids are bytes. Returns it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(SHAPES[shape])
    torch.manual_seed(seed)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes a byte-level tokenizer to `folder`, whose first 256 ids are bytes; it knows `vocab_size` ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([f"<r{i}>" for i in range(vocab_size - len(alphabet))])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    told = folder / "tokenizer_config.json"
    fields = json.loads(told.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}  # as transformers 4 knows it
    told.write_text(json.dumps(fields, indent=2) + "\n")
