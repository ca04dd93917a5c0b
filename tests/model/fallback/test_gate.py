"""Models whose layers keep more than keys and values are refused by their configuration, with what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from millrace.model.fallback.checkpoint_loading import longest_sequence
from millrace.model.fallback.errors import UnservableError
from millrace.model.fallback.gate import auto_class
from tests.model.fallback.tiny_models import KINDS, make_config

LINEAR = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
    "factor": 4.0,
}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mamba", {}, r"keep a state besides keys and values \(linear_attention in 2 of 2\)"),
    ("qwen3_next", {"num_hidden_layers": 4}, r"keep a state besides keys and values \(linear_attention in 3 of 4\)"),
    ("jamba", {"num_hidden_layers": 4}, r"keep a state besides keys and values \(linear_attention in \d of 4\)"),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}, r"keep a state besides keys and values \(conv in 1 of 2\)"),
    ("rwkv", {}, "keep a state besides keys and values"),
    ("deepseek_v32", {}, r"choose or compress their keys \(indexed_attention in 2 of 2\)"),
    ("deepseek_v4", {}, r"choose or compress their keys \(.*compressed.*_attention in"),
    ("bloom", {}, "its attention does not go through transformers' attention interface"),
    ("mpt", {}, "its attention does not go through transformers' attention interface"),
    ("falcon", {}, "its attention does not go through transformers' attention interface"),
    ("bart", {}, "is_encoder_decoder = true"),
    ("t5", {}, "is_encoder_decoder = true"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True: it attends in both"),
    ("clip", {}, "has no class of this type that generates text"),
]


@pytest.mark.parametrize(("model_type", "keys", "reason"), REFUSED, ids=[model_type for model_type, *_ in REFUSED])
def test_a_model_that_does_not_fit_is_refused_by_its_configuration(
    model_type: str, keys: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnservableError, match=reason):
        auto_class(make_config(model_type, **keys) if model_type in SMALL else CONFIG_MAPPING[model_type](**keys))


SMALL = {"mamba", "qwen3_next", "jamba", "lfm2", "rwkv", "deepseek_v32", "deepseek_v4"}


@pytest.mark.parametrize("model_type", KINDS)
def test_a_model_that_keeps_keys_and_values_only_is_let_through(model_type: str) -> None:
    assert auto_class(make_config(model_type)).__name__ == "AutoModelForCausalLM"


def test_the_longest_sequence_ends_where_numbers_begin_to_follow_the_batch() -> None:
    assert longest_sequence(make_config("llama")) == 256
    assert longest_sequence(make_config("llama", rope_parameters=DYNAMIC)) == 256
    phi3 = make_config("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64)
    assert longest_sequence(phi3) == 64
    assert longest_sequence(make_config("llama4_text", floor_scale=100)) == 99
    assert longest_sequence(make_config("llama4_text", floor_scale=100, attn_temperature_tuning=False)) == 256
