"""The GPU's benchmark, as far as it goes without one: its floors, its steps on simulated streams, and what it says."""

from __future__ import annotations

import subprocess
import sys
from itertools import count
from pathlib import Path
from random import Random

import pytest
import torch

from millrace.kernels import step_state
from millrace.runtime.simstreams import SimStreams
from tests.bench.gpu.checks import check_step_state
from tests.bench.gpu.floors import GPU_SHAPES, Device, decode_floor_s, kv_bytes, num_streamed
from tests.bench.gpu.steps import NUM_TIMED, NUM_WARM, Subject, as_json, measure

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 40,
    "vocab_size": 50,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("shape", "rows", "milliseconds"),
    [("llama-3.1-8b", 1, 3.52), ("llama-3.1-8b", 64, 5.49), ("llama-3.1-8b", 256, 12.85), ("qwen3-0.6b", 256, 7.38)],
)
def test_floors_of_known_models_at_1k_tokens_are_what_a_calculator_says(
    shape: str, rows: int, milliseconds: float
) -> None:
    assert 1e3 * decode_floor_s(GPU_SHAPES[shape], rows, 1024) == pytest.approx(milliseconds, rel=0.01)


def test_a_floor_by_hand() -> None:
    weights = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 40 + 50 * 32
    assert num_streamed(TINY) == weights and kv_bytes(TINY) == 2 * 16 * 2
    few, many = (decode_floor_s(TINY, rows, 10, Device(1.0, 4.0)) for rows in (1, 100))
    assert few == 2 * weights + 640 and many == 50 * weights + 64_000, "bound by memory, then by arithmetic"


@pytest.mark.parametrize("is_eager", [True, False])
def test_steps_are_measured_on_any_streams(is_eager: bool) -> None:
    ticks = count()
    subject = Subject(TINY, torch.device("cpu"), [(4, 40), (3, 100)], 16)
    line = subject.line(SimStreams(Random(0)), lambda: float(next(ticks)), is_eager=is_eager)
    row = measure(subject, line, 3, 40, lambda: float(next(ticks)))
    assert line.outcomes.num_generated[:3].tolist() == [NUM_WARM + NUM_TIMED] * 3
    assert row.has_graphs != is_eager and row.submit_us == 1e6
    assert row.step_us >= 7 and row.idle_us >= 1, "in operations of the simulated device"
    (told,) = as_json([row])
    assert told["floor_share"] == row.floor_us / row.step_us and told["num_rows"] == 3


def test_the_check_of_kernels_finds_one_that_is_wrong_and_no_other() -> None:
    class Wrong:
        take_news, make_inputs = step_state.take_news, step_state.make_inputs

        @staticmethod
        def settle(out: torch.Tensor, chosen: torch.Tensor, sampled: torch.Tensor, slots: step_state.SlotState) -> None:
            step_state.settle(out, chosen, sampled, slots)
            out[1].clamp_(max=step_state.STOP)

    cpu = torch.device("cpu")
    assert list(check_step_state(step_state, cpu, 1)) == []
    found = list(check_step_state(Wrong, cpu, 1))  # type: ignore[arg-type]
    assert found and all("told is not the twin's" in complaint for complaint in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_fails() -> None:
    command = [sys.executable, "-m", "tests.bench.gpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 2 and "no CUDA device" in done.stderr and not done.stdout
