"""The choice of kernels on the torch backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from millrace.kernels import kernel_set
from millrace.model.families.registry import parse_config
from millrace.model.spec import NormSpec, QkNorm, RecurrentSpec
from millrace.stages.backends.torch.fitted_runner import backend_name
from millrace.stages.backends.torch.loading import _load_kernels, check_gaps
from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError
from tests.model.checkpoints import SHAPE

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LLAMA = parse_config({"model_type": "llama", **SHAPE}, "")
MIXTRAL = parse_config({"model_type": "mixtral", **SHAPE}, "")
ROWS = QkNorm(norm=NormSpec(), over="row", when="after_rope")
ROTATED = replace(LLAMA, layers=(replace(LLAMA.layers[0], mixer=replace(LLAMA.attention, qk_norm=ROWS)),))


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
    assert [backend_name(auto, GPU, ROTATED), backend_name(triton, GPU, ROTATED)] == ["torch", "triton"]
    assert backend_name(auto, GPU, MIXTRAL) == "triton"


@pytest.mark.parametrize(
    ("mixer", "sentence"),
    [
        (
            {"qk_norm": ROWS},
            "llama: attention_backend = triton lacks norms over rows of heads after the rotation; use attention_back",
        ),
        ({"scale": 0.0}, "lacks scores times 0; use attention_backend = torch"),
        ({"value_dim": 8}, r"lacks values of 8 numbers beside keys of 16$"),  # torch lacks them too
        (None, r"lacks recurrent layers: kda$"),
    ],
)
def test_what_triton_lacks_is_refused_with_the_setting_that_serves_it(
    mixer: dict[str, Any] | None, sentence: str
) -> None:
    layer = LLAMA.layers[0]
    changed = RecurrentSpec(kind="kda") if mixer is None else replace(LLAMA.attention, **mixer)
    spec = replace(LLAMA, layers=(layer, replace(layer, mixer=changed)))
    with pytest.raises(ConfigError, match=sentence):
        check_gaps(spec, "triton")


def test_on_a_gpu_triton_computes_recurrent_layers() -> None:
    layers = LLAMA.layers[0], replace(LLAMA.layers[0], mixer=RecurrentSpec(kind="gdn"))
    assert backend_name(EngineConfig(), GPU, replace(LLAMA, layers=layers)) == "triton"
