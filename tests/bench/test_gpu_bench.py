"""The GPU's benchmark, as far as it goes without one: its floors, its steps on simulated streams, and what it says.

`python -m tests.bench.gpu --dry` is run whole: all parts, tiny, with Triton's kernels in their interpreter.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from millrace.kernels.layout import step_state
from millrace.runtime.device_streams.simulated import SimStreams
from millrace.stages.errors import ConfigError
from tests.bench.gpu import __main__ as command
from tests.bench.gpu import one
from tests.bench.gpu.floors import (
    GPU_SHAPES,
    Device,
    decode_floor_s,
    kv_bytes,
    num_streamed,
    prefill_floor_s,
    stream_floor_s,
)
from tests.bench.gpu.part_table import LIMIT_S, PART_LIMIT_S, PARTS
from tests.bench.gpu.parts import gates, sanitizer, steps
from tests.bench.gpu.parts.checks import check_step_state
from tests.bench.gpu.parts.steps import NUM_TIMED, NUM_WARM, Subject, as_json, measure
from tests.bench.gpu.parts.workload import requests_of
from tests.bench.gpu.place import DRY, Place

ROOT = Path(__file__).parents[2]

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
        apply_updates, make_inputs = step_state.apply_updates, step_state.make_inputs

        @staticmethod
        def note_tokens(
            out: torch.Tensor, chosen: torch.Tensor, sampled: torch.Tensor, slots: step_state.SlotState
        ) -> None:
            step_state.note_tokens(out, chosen, sampled, slots)
            out[1].clamp_(max=step_state.STOP)

    cpu = torch.device("cpu")
    assert list(check_step_state(step_state, cpu, 1)) == []
    found = list(check_step_state(Wrong, cpu, 1))  # type: ignore[arg-type]
    assert found and all("told is not the twin's" in complaint for complaint in found)


def test_the_workload_is_the_one_that_others_report() -> None:
    requests = requests_of(0)
    assert len(requests) == 256 and sum(num_answer for _, num_answer in requests) == 133_966
    assert all(100 <= len(prompt) <= 1024 and 100 <= num_answer <= 1024 for prompt, num_answer in requests)
    lengths = [(len(prompt), num_answer) for prompt, num_answer in requests]
    assert 133_966 / stream_floor_s(GPU_SHAPES["qwen3-0.6b"], lengths) == pytest.approx(36_300, rel=0.03)


def test_the_floor_of_a_prompt_is_what_a_calculator_says() -> None:
    assert prefill_floor_s(GPU_SHAPES["llama-3.1-8b"], 8192) == pytest.approx(0.167, rel=0.01)
    assert stream_floor_s(TINY, [(9, 1)]) == prefill_floor_s(TINY, 9), "the first token comes of the prompt"


# ---- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dry_run_runs_every_part_and_says_that_its_figures_are_no_gpus(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    run = [sys.executable, "-m", "tests.bench.gpu", "--dry", "--json", str(told)]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(told.read_text())
    assert found["device"] == DRY and done.stdout.count(DRY) > len(PARTS)
    assert found["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert set(found["versions"]) >= {"triton", "driver", "numpy"}
    parts = found["parts"]
    assert list(parts) == [part.name for part in PARTS]
    assert all(part["rows"] and not part["wrong"] and "failed" not in part for part in parts.values())
    kernels = {row["kernel"].split(" ")[0] for row in parts["kernels"]["rows"]}
    assert kernels >= {
        "rms_norm",
        "attention_prologue",
        "paged_decode",
        "paged_attention",
        "choose",
        "thresholds",
        "make_inputs",
    }
    for name in ("checks", "kernels", "steps-0.6b", "steps-8b"):
        assert not {"orjson", "anyio", "structlog", "aiohttp", "pydantic", "pytest"} & set(parts[name]["packages"])
    assert parts["workload"]["rows"][0]["answer_tokens"] == parts["transformers"]["rows"][0]["answer_tokens"]
    assert found["workload_ratio"] > 0


def test_a_dry_run_does_not_write_where_results_are_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = command.RESULTS / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "--dry", "--json", str(result)])
    assert command.main() == 2 and "a dry run measures nothing" in capsys.readouterr().err
    assert not result.exists()


def test_parts_run_alone_within_four_minutes_and_all_within_fifteen() -> None:
    assert all(part.limit_s <= PART_LIMIT_S for part in PARTS) and sum(part.limit_s for part in PARTS) <= LIMIT_S


def test_a_part_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(place: Place) -> None:
        place.tell({"before": 1})
        raise ArithmeticError("lost")

    def complain(place: Place) -> None:
        place.complain("too many")

    out = tmp_path / "lines.jsonl"
    monkeypatch.setattr(steps, "run_small", fail)
    monkeypatch.setattr(steps, "run_large", complain)
    monkeypatch.setattr(sys, "argv", ["one", "steps-0.6b", "steps-8b", "--out", str(out), "--dry"])
    assert one.main() == 1
    told: dict[str, Any] = {"parts": {name: {"rows": [], "wrong": []} for name in ("steps-0.6b", "steps-8b")}}
    for line in out.read_text().splitlines():
        command._take(told, json.loads(line))
    small, large = told["parts"].values()
    assert small == {"rows": [{"before": 1}], "wrong": [], "failed": "ArithmeticError: lost"}
    assert large["wrong"] == ["too many"] and large["ended"]


def test_a_part_is_stopped_at_its_limit() -> None:
    lines, trouble = command._run_apart(["checks"], 0, 0.01, is_dry=True)
    assert lines == [] and trouble == "stopped after 0.01 s"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert command.main() == 2
    told = capsys.readouterr()
    assert "no CUDA device" in told.err and not told.out


# ---- gates ----------------------------------------------------------------------------------------------------------


class Told:
    """What a part says."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.wrong: list[str] = []
        self.place = Place(torch.device("cpu"), 0, self.rows.append, self.wrong.append)


GREEDY, DRAWN = (gates.Ask("a", kind) for kind in gates.KINDS[:2])


def said(*answers: list[int], logprob: float = 0.0, **lost: int) -> tuple[list[gates.Answer], Counter[str]]:
    return [gates.Answer(ids, [(logprob, 1, [])]) for ids in answers], Counter(lost)


def test_a_setting_that_changes_an_answer_is_complained_of(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    depths = ({"steps_in_flight": 1}, {"steps_in_flight": 2}, {"steps_in_flight": 4})
    gate = gates.Gate("depth", {"dtype": "float32"}, depths)
    monkeypatch.setattr(gates, "answers", lambda options, *_: said([7], [options["steps_in_flight"] // 4]))
    gates.pass_gate(told.place, gate, {}, [GREEDY, GREEDY], 1)
    assert told.wrong == [
        "depth: greedy answer 1 with {'steps_in_flight': 4} is not the one with {'steps_in_flight': 1}"
    ]
    assert [row["tokens"] for row in told.rows] == [2, 2, 2]


def test_a_setting_that_no_engine_has_is_told_and_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    monkeypatch.setattr(gates, "answers", lambda *_: said([7]))
    gate = gates.Gate("speed", {}, ({"is_faster": True}, {"steps_in_flight": 2}))
    gates.pass_gate(told.place, gate, {}, [GREEDY], 1)
    assert told.rows[0] == {"gate": "speed", "is_faster": True, "skipped": "the engine has no setting is_faster yet"}
    assert told.rows[1]["tokens"] == 1 and not told.wrong


def test_settings_that_an_engine_refuses_are_complained_of_and_the_others_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(options: dict[str, Any], *_: Any) -> tuple[list[gates.Answer], int]:
        if options["block_size"] == 3:
            raise ConfigError("three")
        return said([7])

    told = Told()
    monkeypatch.setattr(gates, "answers", refuse)
    gates.pass_gate(told.place, gates.Gate("size", {}, ({"block_size": 3}, {"block_size": 4})), {}, [GREEDY], 1)
    assert told.wrong == ["size: the engine refuses {'block_size': 3}: three"] and told.rows[0]["block_size"] == 4


def test_answers_that_are_drawn_by_another_noise_may_differ_and_by_the_same_may_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variants = ({"attention_backend": "triton", "seed": 0}, {"attention_backend": "triton", "seed": 1})
    gate = gates.Gate("noise", {}, (*variants, {"attention_backend": "torch", "seed": 2}))
    monkeypatch.setattr(gates, "missing_settings", lambda settings: iter(()))
    monkeypatch.setattr(gates, "answers", lambda options, *_: said([7], [options["seed"]]))
    told = Told()
    gates.pass_gate(told.place, gate, {}, [GREEDY, DRAWN], 1)
    assert told.wrong == [f"noise: drawn answer 1 with {variants[1]} is not the one with {variants[0]}"]


def test_a_bit_of_a_log_probability_counts_where_equal_bits_are_promised_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gates, "answers", lambda options, *_: said([7], logprob=1e-9 * options["steps_in_flight"]))
    variants = ({"steps_in_flight": 1}, {"steps_in_flight": 2})
    for has_equal_bits in (False, True):
        told = Told()
        gates.pass_gate(told.place, gates.Gate("bits", {}, variants, has_equal_bits), {}, [GREEDY], 1)
        assert bool(told.wrong) == has_equal_bits


def test_a_gate_whose_blocks_came_back_another_way_than_it_was_to_try_is_complained_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gates, "answers", lambda options, *_: said([7], recompute=3))
    told = Told()
    gates.pass_gate(told.place, gates.Gate("tight", {}, (gates.RECOMPUTE, gates.SWAP)), {}, [GREEDY], 1)
    assert told.wrong == [f"tight: no sequence had its blocks back by swap with {gates.SWAP}, so that was not tried"]


def test_bits_that_depend_on_the_company_are_complained_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for shift, num_wrong in ((0.0, 0), (1e-9, 2)):
        found = lambda llm, asks, n, shift=shift: said(*([7] for _ in asks), logprob=shift * len(asks))[0]  # noqa: E731
        monkeypatch.setattr(gates, "generate", found)
        monkeypatch.setattr(gates, "engine_of", lambda settings: nullcontext())
        told = Told()
        gates.compare_company(told.place, gates.GATES[1], {}, ["a"], 3, 1)
        assert len(told.wrong) == num_wrong and told.rows[0]["company"] == 3


# ---- the sanitizer --------------------------------------------------------------------------------------------------


def test_what_the_sanitizer_finds_is_complained_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / sanitizer.TOOL
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    told = Told()
    for status in (0, 86):
        tool.write_text(f'#!/bin/sh\necho "Invalid read $1 $2"\nexit {status}\n')
        tool.chmod(0o755)
        sanitizer.run(told.place)
    assert told.rows == [{"tool": check, "status": status} for status in (0, 86) for check in ("memcheck", "racecheck")]
    assert told.wrong == [
        f"{check}: exit status 86: Invalid read --tool {check}\n" for check in ("memcheck", "racecheck")
    ]


def test_a_check_of_the_sanitizer_that_takes_too_long_is_stopped_and_complained_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / sanitizer.TOOL
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sanitizer, "CHECK_LIMIT_S", 0.01)
    told = Told()
    sanitizer.run(told.place)
    assert [row["stopped_after_s"] for row in told.rows] == [0.01, 0.01]
    assert [complaint.split()[0] for complaint in told.wrong] == ["memcheck", "racecheck"]
