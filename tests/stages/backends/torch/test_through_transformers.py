"""Engines whose model runs through transformers: the tokens of transformers in every way, and clear refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.model.errors import CheckpointError
from millrace.stages import LLM, SamplingParams
from millrace.stages.errors import ConfigError
from tests.counts import count
from tests.families.oracle import LENGTHS
from tests.families.rows import ROWS
from tests.families.ways import Outcome, run_way
from tests.families.zoo import Zoo

SMALL: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "num_gpu_blocks": 64, "block_size": 4}
WAYS = {"hunyuan-moe": "chunked", "phimoe": "preempted", "gemma3n-text": "prefix", "youtu": "swapped"}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"), 40, LENGTHS[:2])  # so long that answers lose their blocks


@pytest.fixture(scope="module")
def short_zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("short_zoo"), count(12, 40), LENGTHS[:2])


def row_of(name: str) -> Any:
    return next(row for row in ROWS if row.name == name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), WAYS.items())
def test_tokens_are_those_of_transformers(zoo: Zoo, short_zoo: Zoo, name: str, way: str) -> None:
    made = zoo if way in ("preempted", "swapped") else short_zoo
    assert run_way(made.entry(row_of(name)), way, "auto") == Outcome("equal")


@pytest.fixture(scope="module")
def hunyuan(short_zoo: Zoo) -> Path:
    return short_zoo.entry(row_of("hunyuan-moe")).folder


@pytest.mark.slow
def test_an_engine_says_that_it_runs_through_transformers(hunyuan: Path) -> None:
    with LLM(str(hunyuan), **SMALL) as llm:
        info = llm.info
        assert (info.model_impl, info.attention_backend, info.dtype) == ("transformers", "torch", "float32")
        assert info.memory is not None and 500_000 < info.memory.row("weights").num_bytes < 600_000
        params = SamplingParams(max_tokens=6, temperature=0.8, seed=3, n=2, logprobs=2, prompt_logprobs=1)
        (output,) = llm.generate([[9, 8, 7, 6, 5]], params, use_tqdm=False)
        assert [len(choice.token_ids) for choice in output.outputs] == [6, 6]
        assert output.prompt_logprobs is not None


@pytest.mark.slow
def test_random_weights_need_no_files(hunyuan: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((hunyuan / name).read_bytes())
    with LLM(str(tmp_path), load_format="dummy", **SMALL) as llm:
        (output,) = llm.generate([[9, 8, 7]], SamplingParams(max_tokens=3), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3


def changed(folder: Path, root: Path, edit: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a checkpoint with another configuration or other tensors."""
    values = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    edit(values, tensors)
    (root / "config.json").write_text(json.dumps(values))
    (root / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    save_file(tensors, root / "model.safetensors", {"format": "pt"})
    return root


def without_norm(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def with_bias(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(8)


def with_nan(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][3] = np.nan


def wider(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    values["vocab_size"] = 1_000_000_000


def deeper(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    values["num_hidden_layers"] = 1_000_000_000


def classifier(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    values["architectures"] = ["HunYuanMoEV1ForSequenceClassification"]


def recurrent(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    values["model_type"] = "mamba"


def with_code(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    values["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}


def with_a_number_of_names(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    values["architectures"] = 3


def negative(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    values["head_dim"] = -1


BROKEN = [
    (with_a_number_of_names, "architectures: must be a list of names, not 3"),
    (negative, "is not supported: its modules do not run .*negative dimension"),
    (without_norm, "tensor model.norm.weight is missing, which config.json"),
    (with_bias, "tensor model.layers.0.self_attn.q_proj.bias is not part of a hunyuan_v1_moe model"),
    (with_nan, "tensor model.norm.weight: holds NaN or infinity"),
    (wider, r"describes \d+ weights, and the files hold \d+"),
    (deeper, "num_hidden_layers: must be at most 1024, not 1000000000"),
    (classifier, "HunYuanMoEV1ForSequenceClassification does not generate text"),
    (recurrent, r"model_type: 'mamba' is not supported: its layers keep a state besides keys and values \(linear_"),
    (with_code, "auto_map requires code outside this program, which is never run"),
]


@pytest.mark.parametrize(("edit", "message"), BROKEN, ids=[edit.__name__ for edit, _ in BROKEN])
def test_a_checkpoint_that_is_not_one_is_refused(hunyuan: Path, tmp_path: Path, edit: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        LLM(str(changed(hunyuan, tmp_path, edit)), **SMALL)
    assert len(str(caught.value).splitlines()) == 1


def test_a_setting_that_does_not_fit_is_refused_before_loading(hunyuan: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantization = int8: .* \(model_type = hunyuan_v1_moe: no family here"):
        LLM(str(hunyuan), quantization="int8", **SMALL)
    with pytest.raises(
        CheckpointError, match="model_type: 'hunyuan_v1_moe' is not supported; .*, among them 'hunyuan_v1_dense'"
    ):
        LLM(str(hunyuan), model_impl="millrace", **SMALL)
