"""`millrace bench lora`: the adapters that it makes, the floor of each mix, and a whole run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from millrace.deploy.cli.bench.lora import MixCost, parse_mixes
from millrace.deploy.cli.bench.random_adapter import write_adapters
from millrace.deploy.cli.main import main
from millrace.model.checkpoint import hub
from millrace.model.families.registry import read_spec
from millrace.model.lora.adapter import LINEARS, read_adapter
from millrace.stages.errors import ConfigError


def test_adapters_of_a_bench_are_of_all_linears_and_each_has_another_content(tmp_path: Path) -> None:
    spec = read_spec(hub.bundled_model_path())
    names, num_weights = write_adapters(tmp_path, spec, 3, 5, np.random.default_rng(0))
    adapters = [read_adapter(tmp_path / name, spec, "bfloat16") for name in names]
    assert len({adapter.digest for adapter in adapters}) == 3 and {adapter.rank for adapter in adapters} == {5}
    assert set(adapters[0].linears) == {(layer, linear) for layer in range(spec.num_layers) for linear in LINEARS}
    assert adapters[2].num_bytes == 2 * num_weights


def test_a_mix_has_a_row_for_each_adapter() -> None:
    assert parse_mixes(["1/1", "32/8"]) == [(1, 1), (32, 8)]
    for text in ("8", "4/5", "0/0", "a/b", "3/-1"):
        with pytest.raises(ConfigError, match="must be ROWS/ADAPTERS"):
            parse_mixes([text])


def test_adapters_may_add_a_third_more_than_the_floor_and_a_fiftieth_of_the_step() -> None:
    cost = MixCost(num_rows=8, num_adapters=8, base_ms=10.0, step_ms=13.0, floor_ms=2.0)
    assert cost.most_ms == pytest.approx(2.8)
    assert cost.line().split() == ["8", "8", "10.00", "13.00", "3.00", "2.00", "2.80", "30.0", "20.0"]


@pytest.mark.slow
def test_a_run_times_each_mix_with_and_without_adapters(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saving = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
    sizes = ["--mix", "2/1", "--mix", "3/2", "--rank", "2", "--num-iters", "1", "--input-len", "3", "--output-len", "6"]
    assert main(["bench", "lora", *saving, *sizes]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert [(mix["num_rows"], mix["num_adapters"]) for mix in result["mixes"]] == [(2, 1), (3, 2)]
    for mix in result["mixes"]:
        assert min(mix["base_ms"], mix["step_ms"]) > 0
        read_bytes = mix["num_adapters"] * result["bytes_per_adapter"]
        assert mix["floor_ms"] == pytest.approx(read_bytes / result["gb_per_s"] / 1e6)
    assert "rank 2 on all linears" in capfd.readouterr().out
