"""The GPU's benchmark, as far as it goes without one: its floors, its steps on simulated streams, and what it says."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from itertools import count, product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from millrace.kernels.layout import step_state
from millrace.runtime.device_streams.simulated import SimStreams
from millrace.stages.errors import ConfigError
from tests.bench.gpu.floors import (
    GPU_SHAPES,
    H200,
    Device,
    card_of,
    decode_floor_s,
    kv_bytes,
    num_streamed,
    prefill_floor_s,
    stream_floor_s,
)
from tests.bench.gpu.paired import PairedRatio, order, paired_ratio
from tests.bench.gpu.parts import gates, grants, sanitizer
from tests.bench.gpu.parts.checks import check_step_state
from tests.bench.gpu.parts.subject import Subject
from tests.bench.gpu.parts.workload import requests_of
from tests.bench.gpu.place import Place

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


@pytest.mark.parametrize("num_rows", [(), (3, 4)])
def test_steps_of_all_kinds_are_measured_on_any_streams(num_rows: tuple[int, ...]) -> None:
    ticks = count()
    subject = Subject(TINY, torch.device("cpu"), [(5, 60), (1, 100)], 16, 64)
    line = subject.line(
        SimStreams(Random(0)), lambda: float(next(ticks)), num_rows=num_rows, num_tokens=num_rows and (64,)
    )
    plans = [grants.decode_grants(subject, 3, 40, 6, asked) for asked in (grants.GREEDY, grants.TOP_P, grants.LOGPROBS)]
    plans += [grants.prompt_grants(subject, 50, 3), grants.prompt_grants(subject, 50, 2, 20)]
    plans.append(grants.mixed_grants(subject, 3, 40, 9, 4))
    for plan, num_steps in zip(plans, (6, 6, 6, 3, 6, 4), strict=True):
        times = line.run(plan, lambda: float(next(ticks)))
        assert len(times.step_us) == len(times.idle_us) + 1 == num_steps and set(times.submit_us) == {1e6}
        assert times.num_replayed == (num_steps if num_rows else 0)
        assert all(us >= 7 for us in times.step_us), "in operations of the simulated device"
    assert line.sampler.table.num_generated[:3].tolist() == [4, 4, 4]


def test_a_card_has_its_own_floors_and_one_that_is_unknown_those_that_were_measured() -> None:
    measured = [{"part": "card", "row": {"bytes_per_s": 1e12, "flops_per_s": 2e14}}]
    assert card_of("NVIDIA H200", measured) == H200
    assert card_of("NVIDIA H100 80GB HBM3") == Device(3.0e12, 790e12)
    assert card_of("NVIDIA H100 PCIe").bytes_per_s < card_of("NVIDIA H100 NVL").bytes_per_s
    assert card_of("NVIDIA A100-SXM4-80GB") != card_of("NVIDIA A100-SXM4-40GB")
    for name in ("NVIDIA B300", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"):
        assert card_of(name, measured) == Device(1e12, 2e14) and card_of(name) == H200
    few, many = (
        decode_floor_s(GPU_SHAPES["qwen3-0.6b"], 1, 1024, card_of(f"NVIDIA {name}")) for name in ("H100", "H200")
    )
    assert few / many == pytest.approx(4.3 / 3.0)


def test_a_paired_ratio_and_its_interval_are_those_of_all_samples_that_can_be_drawn() -> None:
    dice = np.random.default_rng(1)
    a, b = dice.lognormal(0, 0.1, (6, 1)), dice.lognormal(-0.1, 0.1, (6, 1))
    ratios = (b / a)[:, 0]
    medians = np.median(ratios[list(product(range(6), repeat=6))], axis=1)  # all 46,656
    found = paired_ratio(a, b, confidence=0.9)
    assert found.ratio == np.median(ratios)
    assert (found.low, found.high) == pytest.approx(np.quantile(medians, [0.05, 0.95]), rel=0.01)
    assert paired_ratio(a, b, confidence=0.5).low > found.low


def test_steps_of_a_block_stay_together_so_that_they_count_as_one_piece_of_evidence() -> None:
    drift = np.array([[1.0] * 50, [2.0] * 50, [3.0] * 50])  # three blocks that differ, and steps that do not
    found = paired_ratio(np.ones_like(drift), drift)
    assert (found.ratio, found.low, found.high) == (2.0, 1.0, 3.0)
    assert paired_ratio(drift, 0.5 * drift) == PairedRatio(0.5, 0.5, 0.5), "a drift that both see is no difference"
    assert "".join(order(4)) == "ABBAABBA"


def test_the_check_of_kernels_finds_one_that_is_wrong_and_no_other() -> None:
    class Wrong:
        apply_updates, make_inputs = step_state.apply_updates, step_state.make_inputs

        @staticmethod
        def note_tokens(
            out: torch.Tensor, chosen: torch.Tensor, buffers: step_state.StepBuffers, slots: step_state.SlotState
        ) -> None:
            step_state.note_tokens(out, chosen, buffers, slots)
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
    assert told.rows == [{"name": check, "status": status} for status in (0, 86) for check in ("memcheck", "racecheck")]
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
