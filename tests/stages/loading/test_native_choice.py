"""What to do where only the native library could do what is asked for."""

from __future__ import annotations

import pytest

from millrace.model.families.registry import parse_config
from millrace.stages import EngineConfig
from millrace.stages.errors import ConfigError
from millrace.stages.loading import native_choice
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
