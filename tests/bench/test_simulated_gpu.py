"""The simulated GPU of the benchmarks: its times are the measured ones, and the engine on it answers in full."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench.gpu.parts.workload import requests_of
from tests.bench.simulated_gpu import fits
from tests.bench.simulated_gpu.__main__ import measure

MEASURED = Path(__file__).parent / "results" / "gpu-h200.json"


def steps() -> list[dict[str, Any]]:
    rows = json.loads(MEASURED.read_text())["parts"]["steps-0.6b"]["rows"]
    return [row for row in rows if row.get("has_graphs") or "prompt_tokens" in row]


@pytest.mark.parametrize("row", steps(), ids=lambda row: f"{row['num_rows']}x{row['context']}")
def test_fitted_step_times_are_within_five_percent_of_the_measured_ones(row: dict[str, Any]) -> None:
    if "prompt_tokens" in row:
        starts, counts = np.zeros(1, np.int32), np.array([row["prompt_tokens"]], np.int32)
    else:
        starts, counts = (np.full(row["num_rows"], number, np.int32) for number in (row["context"], 1))
    assert fits.step_us(starts, counts) == pytest.approx(row["step_us"], rel=0.05)


@pytest.mark.slow
def test_the_engine_answers_in_full_length_over_a_device_that_only_takes_time() -> None:
    requests = requests_of(0, 6, 3, 9, 300)
    found = asyncio.run(measure(requests, "inline", 50.0, 0.0, max_num_batched_tokens=32, max_num_seqs=8))
    assert found["steps"] >= max(num_answer for _, num_answer in requests)
    assert found["us_a_step"]["device"] > 0 and 0 <= found["idle_share"] < 1
    assert set(found["us_a_step"]) >= {"schedule", "allocate", "execute", "sample", "detokenize", "exit"}
