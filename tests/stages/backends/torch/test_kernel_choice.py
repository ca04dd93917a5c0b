"""The choice of kernels on the torch backend."""

from __future__ import annotations

import pytest
import torch

from millrace.kernels import kernel_set
from millrace.stages.backends.torch.loading import _load_kernels
from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError

CPU = torch.device("cpu")


def test_triton_on_a_cpu_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(attention_backend="triton", device="cpu")
    with pytest.raises(ConfigError, match="attention_backend = triton"):
        _load_kernels(config, CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # as with a GPU that is not used
    with pytest.raises(ConfigError, match="attention_backend = triton with device = cpu: .* device = cuda"):
        _load_kernels(config, CPU)


def test_a_backend_that_is_not_installed_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_set.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="triton is not installed"):
        _load_kernels(EngineConfig(attention_backend="triton"), CPU)
