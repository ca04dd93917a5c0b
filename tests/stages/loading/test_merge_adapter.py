"""The setting `merge_adapter`: a model with an adapter in it answers as a checkpoint that was merged before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from millrace.model.checkpoint.canonical import widened
from millrace.model.checkpoint.safetensors import Checkpoint
from millrace.model.demo import WEIGHTS
from millrace.model.errors import ModelError
from millrace.stages import LLM, SamplingParams
from millrace.stages.errors import ConfigError
from tests.model.lora.peft_formats import ALPHA, LINEARS, PREFIX, RANK, save_adapter

SETTINGS = {"device": "cpu", "num_gpu_blocks": 32, "max_model_len": 128, "dtype": "float32"}
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)

OF_THE_BASE = [15, 402, 308, 265, 628, 478]  # the first tokens of the bundled model's own answer


def adapter_for_demo(folder: Path) -> Path:
    """A random adapter for all linears of the bundled model, strong enough to change what it says."""
    base, draws, tensors = Checkpoint(WEIGHTS), np.random.default_rng(3), {}
    for name in sorted(name for name in base.names if name.removesuffix(".weight").endswith(LINEARS)):
        rows, columns = base.shape(name)
        path = PREFIX + name.removesuffix(".weight")
        tensors[f"{path}.lora_A.weight"] = draws.standard_normal((RANK, columns), np.float32) / columns**0.5
        tensors[f"{path}.lora_B.weight"] = draws.standard_normal((rows, RANK), np.float32) * np.float32(0.05)
    return save_adapter(folder, tensors)


def merged_before(adapter: Path, folder: Path) -> Path:
    """A copy of the bundled model in float32 with the adapter in its weights."""
    shutil.copytree(WEIGHTS, folder)
    base, found = Checkpoint(WEIGHTS), load_file(adapter / "adapter_model.safetensors")
    tensors = {name: widened(base.array(name)) for name in base.names}
    for name in tensors:
        a, b = (found.get(f"{PREFIX}{name.removesuffix('weight')}lora_{one}.weight") for one in "AB")
        if a is not None and b is not None:
            tensors[name] = np.asarray(tensors[name] + ALPHA / RANK * (b.astype(np.float64) @ a), np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def answer(**settings: object) -> list[int]:
    with LLM(**{**SETTINGS, **settings}) as llm:  # type: ignore[arg-type]
        return list(llm.generate(["Once upon a time"], PARAMS)[0].outputs[0].token_ids)


def test_an_adapter_is_in_the_answers_as_if_it_was_merged_before(tmp_path: Path) -> None:
    adapter = adapter_for_demo(tmp_path / "x")
    merged = answer(model=str(merged_before(adapter, tmp_path / "merged")))
    assert merged[:6] != OF_THE_BASE and answer(merge_adapter=[str(adapter)]) == merged


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"load_format": "dummy"},
            "merge_adapter: needs the weights of a checkpoint, and load_format = dummy has none",
        ),
        ({"model_impl": "transformers"}, "merge_adapter = .*: is for decoders of the families here"),
    ],
)
def test_settings_that_rule_merging_out_are_named(tmp_path: Path, settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(**SETTINGS, merge_adapter=[str(tmp_path)], **settings)  # type: ignore[arg-type]


def test_an_adapter_of_another_model_ends_the_start_in_one_line(tmp_path: Path) -> None:
    adapter = adapter_for_demo(tmp_path / "x")
    keys = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    path = f"{PREFIX}model.layers.900.mlp.up_proj"
    save_adapter(adapter, {**tensors, f"{path}.lora_A.weight": np.ones((RANK, 8), np.float32)}, **keys)
    with pytest.raises(
        ModelError, match=r"^adapter 'x': changes model.layers.900.mlp.up_proj, which this model has not"
    ):
        LLM(**SETTINGS, merge_adapter=[str(adapter)])  # type: ignore[arg-type]
