"""Files and folders that are no whole, unquantized checkpoint: named, with their base model and the way out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.model.checkpoint.safetensors import Checkpoint
from millrace.model.errors import CheckpointError
from millrace.model.families.registry import read_spec

CONFIG = {"model_type": "llama", "hidden_size": 64}
CARD = "---\nlicense: mit\nbase_model:\n- meta/Llama-9\n---\n# Model\nbase_model: other/one\n"


def refusal(root: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_spec(root)
    return str(caught.value)


def test_a_gguf_file_beside_a_config_without_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"holds m.gguf and no safetensors; serve .*m.gguf itself"):
        Checkpoint(tmp_path)


def test_an_adapter_is_named_with_its_base_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 16, "base_model_name_or_path": "meta/Llama-9"})
    )
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    message = refusal(tmp_path)
    assert "is a LORA adapter of rank 16 for meta/Llama-9, not a model" in message
    ways = f"--enable-lora --lora-modules NAME={tmp_path}, or with --merge-adapter {tmp_path}"
    assert message.endswith(f"serve meta/Llama-9 with {ways}")
    with pytest.raises(CheckpointError, match="a LORA adapter of rank 16"):
        Checkpoint(tmp_path)  # as in a folder with the base model's config.json


def test_weights_of_mlx_are_named_with_the_model_they_were_made_of(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization": {"group_size": 64, "bits": 8}}))
    message = refusal(tmp_path)
    assert "quantization: 'mlx' weights of 8 bits" in message and "serve the unquantized checkpoint" in message
    (tmp_path / "README.md").write_text(CARD)
    assert "serve meta/Llama-9, which they were made of" in refusal(tmp_path)


def test_older_quantized_and_original_forms_are_named(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    (tmp_path / "consolidated.safetensors").write_bytes(b"")
    assert "original form of its maker" in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "quantize_config.json").write_text('{"bits": 5}')
    assert f"quantize_config.json ({tmp_path}): quantization_config: bits = 5: gptq is read" in refusal(tmp_path)
