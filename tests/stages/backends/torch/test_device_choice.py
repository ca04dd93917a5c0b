"""The one GPU that an engine uses, of several, on a fake of `torch.cuda`."""

from __future__ import annotations

import pytest
import torch

from millrace.runtime.env.cpus import ComputeThreads
from millrace.stages.backends.torch.loading import choose_device
from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError
from tests.stages.backends.cuda.fake_cuda import FakeCuda

THREADS = ComputeThreads(torch.get_num_threads(), (), "as it is")


@pytest.mark.parametrize(
    ("setting", "num_gpus", "chosen"),
    [
        ("auto", 2, "cuda:0"),
        ("cuda", 2, "cuda:0"),
        ("cuda:0", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
        ("auto", 0, "cpu"),
        ("cpu", 2, "cpu"),
    ],
)
def test_the_configured_gpu_is_chosen_and_made_current(
    monkeypatch: pytest.MonkeyPatch, setting: str, num_gpus: int, chosen: str
) -> None:
    cuda = FakeCuda(num_gpus)
    cuda.install(monkeypatch)
    device = choose_device(EngineConfig(device=setting), THREADS)
    assert str(device) == chosen
    assert cuda.calls == ([] if chosen == "cpu" else [("set_device", device.index)])


@pytest.mark.parametrize(
    ("setting", "num_gpus", "text"),
    [
        ("cuda:2", 2, r"device = cuda:2: torch sees 2 CUDA device\(s\), the last is cuda:1"),
        ("cuda:1", 0, "device = cuda:1: torch sees no CUDA device; use device = cpu"),
    ],
)
def test_a_gpu_that_is_not_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch, setting: str, num_gpus: int, text: str
) -> None:
    FakeCuda(num_gpus).install(monkeypatch)
    with pytest.raises(ConfigError, match=text):
        choose_device(EngineConfig(device=setting), THREADS)


@pytest.mark.parametrize("setting", ["gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA", "cuda:1 "])
def test_a_device_of_another_form_is_a_wrong_setting(setting: str) -> None:
    with pytest.raises(ConfigError, match="must be auto, cpu, cuda, or one of several GPUs, such as cuda:1"):
        EngineConfig(device=setting)
