"""Older forms of config.json mean what transformers makes of them, and what changes the computation is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from millrace.model.errors import CheckpointError
from millrace.model.families.registry import parse_config
from millrace.model.spec import DecoderSpec

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0 + index for index in range(8)]}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
TYPES = ["sliding_attention", "full_attention"] * 2


def parse(model_type: str, **keys: Any) -> DecoderSpec:
    spec = parse_config({**SIZES, **keys, "model_type": model_type}, "config.json")
    return replace(spec, bos_token_id=None, eos_token_ids=())


OLDER: list[tuple[str, dict[str, Any]]] = [
    ("phi", {"partial_rotary_factor": 0.25, "rope_theta": 500.0, "rope_scaling": None}),
    ("phi3", {"rope_scaling": {"type": "yarn", **FACTORS}, "original_max_position_embeddings": 64}),
    ("phi3", {"rope_scaling": {"type": "longrope", **FACTORS}, "max_position_embeddings": 8192}),
    (
        "phi3",
        {
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [3.0] * 6},
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 128,
        },
    ),
    ("glm", {"partial_rotary_factor": 0.25, "head_dim": 16, "rope_theta": 500.0}),
    ("olmo3", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", **YARN}, "sliding_window": 16}),
    ("smollm3", {"rope_theta": 5e6, "no_rope_layers": [1, 1, 1, 0]}),
    ("smollm3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 16}),
    ("cohere2", {"sliding_window_pattern": 2, "sliding_window": 16, "rope_theta": 5e4}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4, "sliding_window_pattern": None}),
    ("exaone4", {"sliding_window": 16, "layer_types": TYPES, "sliding_window_pattern": "LG"}),
    ("ministral3", {"rope_parameters": None, "head_dim": 16}),
    ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}, "rope_theta": 1e4}),
    ("internlm3", {"qkv_bias": True, "bias": True, "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}}),
    ("exaone", {"num_layers": 4, "layer_norm_epsilon": 1e-3, "activation_function": "gelu"}),
    ("apertus", {"rope_theta": 5e5, "rope_scaling": None}),
    ("cwm", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
]


@pytest.mark.parametrize(("model_type", "keys"), OLDER)
def test_an_older_form_means_what_transformers_makes_of_it(model_type: str, keys: dict[str, Any]) -> None:
    theirs = CONFIG_MAPPING[model_type](**{**SIZES, **keys}).to_dict()
    theirs.pop("model_type")
    assert parse(model_type, **keys) == parse(model_type, **theirs)


def test_su_is_the_first_name_of_longrope() -> None:
    su, longrope = (
        parse("phi3", rope_scaling={"type": kind, **FACTORS}, original_max_position_embeddings=64)
        for kind in ("su", "longrope")
    )
    assert su == longrope and su.ropes[0].kind == "longrope"


def test_the_alpha_of_hunyuan_is_a_larger_base() -> None:
    rope = parse("hunyuan_v1_dense", rope_scaling={"type": "dynamic", "alpha": 16.0, "factor": 1.0}).ropes[0]
    assert rope.kind == "default" and rope.theta == pytest.approx(1e4 * 16 ** (16 / 14))


def test_the_text_half_of_a_published_gemma_3_names_few_sizes() -> None:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    spec = parse_config({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}, "config.json")
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262_208)
    assert [rope.kind for rope in spec.ropes] == ["linear", "default"] and spec.windows.count(None) == 5
    assert spec.head.is_tied and spec.eos_token_ids == (1, 106)


def test_the_output_layer_is_tied_as_the_wrapper_says() -> None:
    text = {"model_type": "mistral", **SIZES, "tie_word_embeddings": False}
    assert parse_config({"model_type": "mistral3", "text_config": text}, "").head.is_tied
    untied = {"model_type": "mistral3", "text_config": text, "tie_word_embeddings": False}
    assert not parse_config(untied, "").head.is_tied


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: rope_type: 'linear'"),
    ("olmo", {"clip_qkv": 8.0}, "clip_qkv: 8.0"),
    ("iquestcoder", {"clip_qkv": 8.0}, "clip_qkv: 8.0"),
    ("iquestcoder", {"use_sliding_window": True}, "use_sliding_window: True"),
    ("hunyuan_v1_dense", {"use_cla": True}, "use_cla: True"),
    ("apertus1p5_text", {"output_vocab_size": 100}, "output_vocab_size: "),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers: must list 1"),
    ("smollm3", {"layer_types": TYPES, "sliding_window": 16}, "no sliding_window is in force"),
    ("granite_swa", {"layer_rope_theta": [0.5] * 4}, "layer_rope_theta: must hold 0 or numbers above 1"),
    ("granite_swa", {"layer_rope_theta": [1e4]}, "layer_rope_theta: must list a number for each of the 4 layers"),
    ("granitemoehybrid", {}, "layer_types: no layer has attention"),
    ("granitemoehybrid", {"layer_types": ["mamba"] * 4}, "layer_types: no layer has attention, and a model of recurr"),
    ("granitemoehybrid", {"layer_types": ["mamba", "rwkv"] * 2}, "layer_types: 'rwkv' is not supported"),
    ("granite", {"logits_scaling": 0}, "logits_scaling: must be above 0"),
    ("ministral3", {"rope_scaling": {"rope_type": "yarn", **YARN}}, "llama_4_scaling_beta: is missing"),
    ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern: must be a whole number"),
]


@pytest.mark.parametrize(("model_type", "keys", "message"), REFUSED, ids=[message[:40] for _, _, message in REFUSED])
def test_a_key_that_is_not_built_or_not_valid_is_refused(model_type: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(model_type, **keys)
    assert message in str(caught.value)
