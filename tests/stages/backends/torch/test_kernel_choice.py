"""The choice of kernels on the torch backend."""

from __future__ import annotations

import pytest
import torch

from millrace.kernels import kernel_set
from millrace.model.families.registry import parse_config
from millrace.stages.backends.torch.fitted_runner import backend_name
from millrace.stages.backends.torch.loading import _load_kernels
from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError
from tests.model.checkpoints import SHAPE

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LLAMA = parse_config({"model_type": "llama", **SHAPE}, "")
MIXTRAL = parse_config({"model_type": "mixtral", **SHAPE}, "")


def test_triton_on_a_cpu_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(attention_backend="triton", device="cpu")
    with pytest.raises(ConfigError, match="attention_backend = triton"):
        _load_kernels(config, CPU, LLAMA)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # as with a GPU that is not used
    with pytest.raises(ConfigError, match="attention_backend = triton with device = cpu: .* device = cuda"):
        _load_kernels(config, CPU, LLAMA)


def test_a_backend_that_is_not_installed_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_set.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="triton is not installed"):
        _load_kernels(EngineConfig(attention_backend="triton"), CPU, LLAMA)


def test_on_a_gpu_torch_computes_what_tritons_kernels_lack() -> None:
    auto, triton = EngineConfig(), EngineConfig(attention_backend="triton")
    assert [backend_name(auto, GPU, LLAMA), backend_name(auto, CPU, LLAMA)] == ["triton", "torch"]
    assert [backend_name(auto, GPU, MIXTRAL), backend_name(triton, GPU, MIXTRAL)] == ["torch", "triton"]
