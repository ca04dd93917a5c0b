"""Models that also read images: where the keys and tensors of their text halves lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from millrace.model.checkpoint.tensor_shapes import open_source
from millrace.model.errors import CheckpointError
from millrace.model.families.names import tensors_of
from millrace.model.families.registry import parse_config, read_spec
from tests.model.checkpoints import SHAPE

MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}


def test_a_flat_file_of_qwen2_vl_means_what_a_nested_one_does() -> None:
    text = {**SHAPE, "rope_scaling": MROPE, "rope_theta": 5e5, "tie_word_embeddings": True}
    flat = parse_config({"model_type": "qwen2_vl", **text, "vision_config": {}}, "")
    nested = parse_config({"model_type": "qwen2_vl", "text_config": {**text, "model_type": "qwen2_vl_text"}}, "")
    assert flat == nested and flat.head.is_tied and flat.attention.has_qkv_bias
    assert (flat.ropes[0].kind, flat.ropes[0].theta, flat.ropes[0].dim) == ("default", 5e5, flat.head_dim)


def test_keys_that_a_text_half_leaves_out_are_those_of_its_class() -> None:
    llava = parse_config({"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32_064}}, "")
    assert (llava.hidden_size, llava.intermediate_size, llava.num_layers) == (4096, 11_008, 32)
    assert (llava.num_kv_heads, llava.vocab_size, llava.head.is_tied) == (32, 32_064, False)
    mistral = parse_config({"model_type": "llava_next", "text_config": {"model_type": "mistral"}}, "")
    assert (mistral.num_kv_heads, mistral.intermediate_size) == (8, 14_336)


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_either_place_may_say_that_the_output_layer_is_the_embedding(where: str) -> None:
    key = {"tie_word_embeddings": True}
    inner = {**SHAPE, "model_type": "llama", **(key if where == "inside" else {})}
    outer = {"model_type": "llava", "text_config": inner, **(key if where == "outside" else {})}
    assert parse_config(outer, "").head.is_tied


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_word_does_not_say_whether_the_output_layer_is_the_embedding(where: str) -> None:
    key = {"tie_word_embeddings": "no"}
    inner = {**SHAPE, "model_type": "llama", **(key if where == "inside" else {})}
    with pytest.raises(CheckpointError, match="tie_word_embeddings: must be true or false, not 'no'"):
        parse_config({"model_type": "llava", "text_config": inner, **(key if where == "outside" else {})}, "")


def test_the_output_layer_of_a_wrapper_is_not_scaled() -> None:
    text = {**SHAPE, "model_type": "cohere2", "logit_scale": 0.25}
    assert parse_config(text, "").head.scale == 0.25
    assert parse_config({"model_type": "aya_vision", "text_config": text}, "").head.scale == 1.0


@pytest.mark.parametrize("model_type", ["unknown", ["llama"]])
def test_a_text_half_of_a_family_that_is_not_built_is_refused(model_type: Any) -> None:
    with pytest.raises(
        CheckpointError, match="text_config: model_type: .* is not supported; the supported types are in"
    ):
        parse_config({"model_type": "llava", "text_config": {**SHAPE, "model_type": model_type}}, "config.json")


@pytest.mark.parametrize(
    ("prefix", "head", "other"),
    [
        ("model.language_model.", "lm_head.weight", "model.vision_tower.patch.weight"),
        ("language_model.model.", "language_model.lm_head.weight", "vision_tower.patch.weight"),
        ("model.text_model.", "lm_head.weight", "model.connector.proj.weight"),
        ("model.", "lm_head.weight", "visual.blocks.0.attn.qkv.weight"),
    ],
)
def test_the_other_halves_are_left_out_with_one_line(prefix: str, head: str, other: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"model_type": "llava", "text_config": {**SHAPE, "model_type": "llama"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path)
    numbers = {target.name: torch.full(target.shape, float(i)) for i, target in enumerate(tensors_of(spec))}
    stored = {head if "lm_head" in name else prefix + name.removeprefix("model."): t for name, t in numbers.items()}
    save_file({**stored, other: torch.ones(2, 2)}, tmp_path / "model.safetensors")
    source, _ = open_source(tmp_path, spec, "auto")
    assert all((source.array(name) == tensor[0].flatten()[0].item()).all() for name, tensor in numbers.items())
    assert source.warnings == [f"tensors that no text is made with are not used: {other}"]
