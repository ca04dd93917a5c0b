"""Which models run through transformers, by config.json and the settings, and which settings these refuse."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from millrace.model.demo import WEIGHTS
from millrace.model.errors import CheckpointError
from millrace.runtime.startup.phases import Phases
from millrace.stages import EngineConfig
from millrace.stages.errors import ConfigError
from millrace.stages.loading.early import EarlyLoading, OpenedModel
from millrace.stages.loading.model_impl import check_settings, why_through_transformers
from tests.model.checkpoints import SHAPE


def folder_of(tmp_path: Path, **values: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


@pytest.mark.parametrize(
    ("values", "model_impl", "reason"),
    [
        ({"model_type": "llama"}, "auto", None),
        ({"model_type": "llama"}, "transformers", "model_impl = transformers"),
        ({"model_type": "phimoe"}, "auto", "model_type = phimoe: no family here describes it"),
        ({"model_type": "gpt-sw3"}, "auto", "model_type = gpt-sw3: no family here describes it"),
        ({"model_type": "phimoe"}, "millrace", None),
        ({"model_type": "of-nobody"}, "auto", None),
        ({"model_type": '", "'}, "auto", None),
        ({"model_type": ["llama"]}, "auto", None),
        ({}, "auto", None),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "auto", None),
        ({"model_type": "gemma3", "text_config": {}}, "auto", None),
    ],
)
def test_a_model_without_a_family_runs_through_transformers(
    tmp_path: Path, values: dict[str, Any], model_impl: Any, reason: str | None
) -> None:
    assert why_through_transformers(EngineConfig(model_impl=model_impl), folder_of(tmp_path, **values)) == reason


def test_what_the_decoder_lacks_is_said_before_its_tensors_are_compared(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    root = folder_of(tmp_path, model_type="opt", word_embed_proj_dim=16, do_layer_norm_before=False, **sizes)
    for backend in ("auto", "torch"):
        config = EngineConfig(model=str(root), device="cpu", model_impl="millrace", attention_backend=backend)
        opening = EarlyLoading(config, Phases(time.monotonic))
        with pytest.raises(ConfigError, match="millrace: opt: the decoder here lacks an embedding of 16 .*; use auto$"):
            opening.result()
        opening.close()


@pytest.mark.parametrize(
    "setting",
    [
        {"quantization": "int8"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8"},
        {"deterministic": True},
        {"attention_backend": "native"},
        {"attention_backend": "triton"},
        {"pooling": "yes_no"},
    ],
    ids=str,
)
def test_settings_of_decoders_here_are_refused_by_name(setting: dict[str, Any]) -> None:
    ((name, value),) = setting.items()
    with pytest.raises(ConfigError, match=rf"{name} = {value}: is for decoders of the families here.*\(because\)"):
        check_settings(EngineConfig(**setting), "because")


def test_other_settings_pass() -> None:
    check_settings(EngineConfig(attention_backend="torch", dtype="float16", speculation="ngram"), "because")


def test_a_family_that_lacks_what_a_key_asks_for_leaves_it_to_transformers(tmp_path: Path) -> None:
    olmo = {"model_type": "olmo", **SHAPE, "clip_qkv": 8.0}
    opened = open_model(folder_of(tmp_path, **olmo))
    assert opened.shape is None and "clip_qkv: 8.0 is not supported" in opened.why_through_transformers
    with pytest.raises(CheckpointError, match=r"clip_qkv: 8\.0 is not supported"):
        open_model(tmp_path, model_impl="millrace")


def open_model(root: Path, **settings: Any) -> OpenedModel:
    opening = EarlyLoading(EngineConfig(model=str(root), device="cpu", **settings), Phases(time.monotonic))
    try:
        return opening.result()
    finally:
        opening.close()


@pytest.mark.slow
def test_a_decoder_here_on_torch_does_without_the_modules_of_transformers() -> None:
    code = (
        "import sys; from millrace.stages import LLM; "
        f"llm = LLM({str(WEIGHTS)!r}, device='cpu', attention_backend='torch', num_gpu_blocks=64, max_model_len=128, "
        "threads=1, max_num_seqs=2, max_num_batched_tokens=64); "
        "llm.close(); sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
