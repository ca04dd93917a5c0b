"""Keys that config.json lacks mean what they mean to transformers: the defaults of the class of the type."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig

from millrace.model.families.registry import MODULES, parse_config
from millrace.model.spec import DecoderSpec

# keys that no file lacks
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "ffn_dim")
SERVED: dict[str, dict[str, Any]] = {  # keys without which a type is refused
    "bamba": {"attn_layer_indices": [1]},
    "lfm2_moe": {"layer_types": ["full_attention"] * 32},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "glm4_moe": {"head_dim": 128},  # the class's sizes give a head of 42, of which half is odd
    "granitemoehybrid": {"num_local_experts": 0, "layer_types": ["full_attention"] * 32},
}


def all_keys(model_type: str) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The configuration of a type without a key but those it needs, and all its keys as a file has them."""
    config = CONFIG_MAPPING[model_type](**SERVED.get(model_type, {}))
    keys: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return config, keys


def spec_of(keys: dict[str, Any]) -> DecoderSpec:
    """The spec without the special tokens, which config.json says or nothing does."""
    return replace(parse_config(keys, "config.json"), bos_token_id=None, eos_token_ids=())


@pytest.mark.parametrize("model_type", sorted(MODULES))
def test_a_file_of_sizes_alone_has_the_defaults_of_transformers(model_type: str) -> None:
    config, keys = all_keys(model_type)
    needed = (*SIZES, *SERVED.get(model_type, {}))
    names = {config.attribute_map.get(size, size) for size in needed} & keys.keys()
    assert spec_of({"model_type": model_type, **{name: keys[name] for name in names}}) == spec_of(keys)
