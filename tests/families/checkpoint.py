"""Writes the tiny checkpoint of a row by transformers: random weights, norms, biases and all other numbers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from tests.families.row import ABSENT, Row

VOCAB_SIZE = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LEARNED_BUFFERS = ("correction_bias", "expert_bias", "layer_scalar")


def make_config(row: Row) -> PreTrainedConfig:
    """The configuration of a row: the keys of SHAPE that its type has, and its own."""
    if unknown := set(row.keys) - known_keys(row.model_type):
        raise ValueError(f"{row.name}: {row.model_type} has no {sorted(unknown)}")
    text = row.keys.get("text_config")
    if text is None:
        return CONFIG_MAPPING[row.model_type](**shape_of(row.model_type, row.keys))
    return CONFIG_MAPPING[row.model_type](**{**row.keys, "text_config": shape_of(text["model_type"], text)})


def shape_of(model_type: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The given keys, and those of SHAPE that the type has and that are not given by any name."""
    other_names = CONFIG_MAPPING[model_type].attribute_map
    given = {*keys, *(other for other, name in other_names.items() if name in keys)}
    return {**{key: value for key, value in SHAPE.items() if key in known_keys(model_type) - given}, **keys}


@cache
def known_keys(model_type: str) -> frozenset[str]:
    """The keys that the configuration of a type has, under all their names."""
    kind = CONFIG_MAPPING[model_type]
    return frozenset(kind().to_dict()) | frozenset(kind.attribute_map)


def make_model(row: Row) -> PreTrainedModel:
    """The model of a row in float32, with random numbers in all that is learned, the same in each run."""
    auto = getattr(transformers, row.auto)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed_of(row))  # some vectors begin with random numbers, to which ours are added
        model = auto.from_config(make_config(row), dtype=torch.float32, attn_implementation=row.attention).eval()
    randomise(model, row)
    return model


def seed_of(row: Row) -> int:
    """A number of the row's own."""
    return zlib.crc32(f"{row.name} {row.seed}".encode())


def randomise(model: PreTrainedModel, row: Row) -> None:
    """Draw matrices anew, and move vectors and numbers from where transformers begins them."""
    draws = np.random.default_rng([zlib.crc32(row.name.encode()), row.seed])
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(LEARNED_BUFFERS)]
    with torch.no_grad():
        for _, parameter in [*model.named_parameters(), *buffers]:
            noise = torch.from_numpy(np.asarray(draws.standard_normal(tuple(parameter.shape), np.float32)))
            if id(parameter) in tables:
                parameter.copy_(noise * row.embed_std)
            elif parameter.dim() < 2:
                parameter += noise * 0.3
            else:
                fan = min((size for size in parameter.shape[-2:] if size > 1), default=parameter.shape[1])
                parameter.copy_(noise * row.gain / fan**0.5)


def rewritten(row: Row, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json as the row wants them in the file."""
    return {key: value for key, value in {**keys, **row.file}.items() if value is not ABSENT}


def write(row: Row, model: PreTrainedModel, folder: Path) -> Path:
    """Save the model of a row with a small tokenizer, to which its class may add tokens; returns the folder."""
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(rewritten(row, json.loads(file.read_text()))))
    alphabet = sorted(ByteLevel.alphabet())[: VOCAB_SIZE - 32]
    tokenizer = Tokenizer(BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
