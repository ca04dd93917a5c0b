"""What to do where only the native library could do what is asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from millrace.model.demo import WEIGHTS
from millrace.model.families.registry import parse_config
from millrace.runtime.env.env import LiveEnv
from millrace.runtime.startup.phases import Phases
from millrace.stages import EngineConfig
from millrace.stages.errors import ConfigError
from millrace.stages.loading import native_choice
from millrace.stages.loading.model import load_model
from millrace.stages.loading.native_choice import require_torch, why_not_native

BLOOM = parse_config({"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96}, "")


def test_no_setting_helps_a_model_that_the_library_does_not_compute() -> None:
    config = EngineConfig(device="cpu", dtype="float32", quantization="int8", attention_backend="torch")
    reason = why_not_native(EngineConfig(device="cpu", dtype="float32"), BLOOM)
    assert reason == "bloom: the native backend lacks alibi"
    with pytest.raises(ConfigError, match=r"int8: .*: bloom: the native backend lacks alibi; leave it out$"):
        require_torch(config, BLOOM, reason)


def test_a_model_that_only_torch_computes_is_refused_with_the_reason_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_choice, "find_spec", lambda name: None)
    config = EngineConfig(device="cpu", dtype="float16")
    text = "PyTorch is not installed, which alone computes this: bloom: no alibi; pip install torch"
    with pytest.raises(ConfigError, match=f"^{text}$"):
        require_torch(config, BLOOM, "bloom: no alibi")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(
    ("settings", "keys", "reason"),
    [
        ({}, {"intermediate_size": 385}, "intermediate_size = 385: must be even for the native step; leave it out"),
        (
            {"attention_backend": "torch"},
            {},
            "attention_backend = torch; leave it out, or use attention_backend = auto",
        ),
        ({"dtype": "float16"}, {}, "dtype = float16: .*; leave it out, or use dtype = bfloat16"),
    ],
)
def test_a_quantization_that_cannot_be_had_is_refused_before_weights_are_read(
    quantization: Any, settings: dict[str, Any], keys: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    for file in WEIGHTS.glob("*.json"):
        shutil.copy(file, tmp_path)
    config = json.loads((WEIGHTS / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | keys))
    settings |= {"model": str(tmp_path), "device": "cpu", "load_format": "dummy", "threads": 1}
    words = f"^quantization = {quantization}: only the native backend supports that, and it does not run here: "
    with pytest.raises(ConfigError, match=words + reason):
        load_model(EngineConfig(quantization=quantization, **settings), Phases(lambda: 0.0), LiveEnv(0))
