"""The setting `tilings`: read for Triton's kernels only, and a file that cannot be used stops the start."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from millrace.kernels import kernel_set
from millrace.kernels.tilings.attention import StepShape, StepTiling
from millrace.kernels.tilings.tables import write_table
from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.weights import load_weights
from millrace.model.families.registry import read_spec
from millrace.runtime.env.log import captured_logs
from millrace.stages.backends.torch.tilings import log_products, tilings_of
from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError
from tests.bench.gpu.place import TINY

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="NVIDIA H200",
        multi_processor_count=132,
        major=9,
        minor=0,
        memory_clock_rate=3_201_000,
        memory_bus_width=6144,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_the_torch_kernels_need_no_tilings() -> None:
    assert tilings_of(EngineConfig(tilings="/no/such/file"), CPU, "torch") is None


def test_a_card_has_its_name_and_its_processors(card: None) -> None:
    found = tilings_of(EngineConfig(), CUDA, "triton")
    assert found is not None and (found.card, found.num_processors, found.is_on) == ("NVIDIA H200", 132, True)
    assert (found.shared_bytes, round(found.bytes_per_s / 1e12, 1)) == (224 << 10, 4.9)
    off = tilings_of(EngineConfig(tilings="off"), CUDA, "triton")
    assert off is not None and not off.is_on


def test_a_file_that_cannot_be_used_stops_the_start(card: None, tmp_path: Path) -> None:
    path = tmp_path / "tilings.json"
    path.write_text(json.dumps({"format": 7}))
    with pytest.raises(ConfigError, match=r"tilings = .*tilings\.json: format = 7: must be 1; measure it again"):
        tilings_of(EngineConfig(tilings=str(path)), CUDA, "triton")


def test_a_measured_tiling_of_attention_that_does_not_fit_the_card_is_logged(card: None, tmp_path: Path) -> None:
    path, step = tmp_path / "tilings.json", StepShape(group=2, head_dim=128, num_rows=64)
    wide = StepTiling(block_m=16, block_n=64, num_warps=4, num_stages=8, occupancy=1)  # 224 KiB of keys and values
    write_table(path, "NVIDIA H200", "today", {"decode": [(step, wide, 70.0)]})
    with captured_logs() as lines:
        tilings_of(EngineConfig(tilings=str(path)), CUDA, "triton")
    (line,) = lines
    assert (line["event"], line["capability"], len(line["left_out"])) == ("tilings.too_large", 90, 1)


def test_the_log_has_a_line_for_each_kind_of_product(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    spec: Any = read_spec(tmp_path)
    tilings = tilings_of(EngineConfig(), CPU, "triton")
    weights = load_weights(tmp_path, spec, CPU, torch.float32, load_format="dummy")
    decoder = Decoder(spec, weights, kernel_set.load("torch"), tilings=tilings)
    with captured_logs() as lines:
        log_products(tilings, decoder)
    (line,) = lines
    assert (line["event"], line["card"], len(line["products"])) == ("products.chosen", "cpu", 4)
    assert all("library: " in product for product in line["products"])
