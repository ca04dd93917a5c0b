"""The token budget by target time: step costs, the room for prompts, and an engine under load in virtual time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import orjson
import pytest

from millrace.stages.backends.rates import TARGET_TOKENS, TARGETS_MS, target_ms_for
from millrace.stages.config import EngineConfig, resolve_step_size
from millrace.stages.errors import ConfigError
from millrace.stages.recordings.cost_model import CostModel
from millrace.stages.recordings.reader import Recording, ScheduleCall
from millrace.stages.recordings.replay import Replay
from millrace.stages.recordings.simulation import Simulation
from millrace.stages.recordings.simulation_result import SimulationResult
from millrace.stages.recordings.workloads import Workload, WorkloadRequest
from millrace.stages.schedule.step_timing.step_budget import (
    FIRST_TOKENS,
    LEAST_TOKENS,
    MOST_INSPECTED,
    MOST_SHARE,
    MOST_STRETCH,
    PATIENCE_S,
    PrefillDemand,
    StepBudget,
    stretch,
    tokens_within,
)
from millrace.stages.schedule.step_timing.step_time_model import StepContents, StepTimeCosts, StepTimeModel
from tests.stages import recorded_runs
from tests.stages.recorded_runs import TIGHT, record

MODEL = CostModel(  # about a model of 135M parameters on two cores
    step_s=5e-3, prefill_token_s=2.5e-4, prefill_pair_s=2e-7, decode_row_s=2e-4, decode_context_s=5e-7
)


def steps(dice: Random, num_steps: int, slow: float = 1.0) -> list[tuple[StepContents, float]]:
    """Steps of some load, every other one with a prompt; each takes as long as `MODEL` says, times `slow`."""
    made = []
    for number in range(num_steps):
        num_decode, num_prefill = dice.randrange(1, 17), dice.randrange(16, 300) * (number % 2)
        pairs = num_prefill * (dice.randrange(800) + num_prefill / 2)
        contents = StepContents(num_prefill, pairs, num_decode, num_decode * dice.randrange(50, 500))
        made.append((contents, slow * MODEL.seconds(contents)))
    return made


def noted(samples: list[tuple[StepContents, float]]) -> StepTimeModel:
    costs = StepTimeModel()
    for contents, seconds in samples:
        costs.note(contents, seconds)
    return costs


# -- what a step costs


def test_costs_are_found_from_steps_and_a_machine_as_before_is_not_slow():
    costs, slowness = noted(steps(Random(0), 100)).read()
    for name in StepTimeCosts.__slots__:
        assert getattr(costs, name) == pytest.approx(getattr(MODEL, name), rel=1e-3)
    assert slowness == pytest.approx(1.0, rel=1e-3)


def test_steps_that_are_late_by_themselves_change_hardly_anything():
    dice = Random(1)
    samples = [(contents, took * (5 if dice.random() < 0.06 else 1)) for contents, took in steps(dice, 200)]
    costs, slowness = noted(samples).read()
    a_step = StepContents(150, 150 * 100, 12, 12 * 200)
    expected = costs.decoding_s(12, 12 * 200) + 150 * costs.prefill_token_s + 150 * 100 * costs.prefill_pair_s
    assert expected == pytest.approx(MODEL.seconds(a_step), rel=0.1) and slowness < 1.25


def test_outcomes_reported_late_and_then_two_at_once_do_not_count_as_quick_steps():
    samples = steps(Random(2), 120)
    for number in range(5, 115, 10):
        (first, took), (second, also_took) = samples[number : number + 2]
        samples[number : number + 2] = [(first, took + also_took - 1e-5), (second, 1e-5)]
    costs, _ = noted(samples).read()
    assert costs.decoding_s(8, 1600) == pytest.approx(MODEL.step_s + 8 * MODEL.decode_row_s + 8e-4, rel=0.2)


def test_a_neighbour_shows_after_a_few_slow_steps_and_is_forgotten_after_some():
    costs = noted(steps(Random(3), 100))
    for contents, took in steps(Random(4), 4, slow=2.0):
        costs.note(contents, took)
    assert costs.read()[1] > 1.8
    for contents, took in steps(Random(5), 64):
        costs.note(contents, took)
    assert costs.read()[1] < 1.1


def test_costs_of_prompts_are_kept_while_there_are_none():
    samples = steps(Random(6), 60)
    decoding = StepContents(num_decode=4, num_context=400)
    costs, _ = noted([*samples, *[(decoding, MODEL.seconds(decoding))] * 5000]).read()
    assert costs.prefill_token_s == pytest.approx(MODEL.prefill_token_s, rel=0.01)


# -- what there is room for


def test_prompts_get_the_tokens_that_fit_in_order_and_a_new_one_gets_the_rest():
    costs = StepTimeCosts(prefill_token_s=1.0)
    assert tokens_within(10.5, costs, [PrefillDemand(30, 0)], 100) == 10
    assert tokens_within(10.5, costs, [PrefillDemand(4, 0), PrefillDemand(4, 0)], 100) == 10
    assert tokens_within(10.5, costs, [PrefillDemand(4, 0)], 7) == 7
    assert tokens_within(10.5, StepTimeCosts(), [PrefillDemand(4, 0)], 7) == 7  # nothing costs anything


def test_tokens_far_into_a_prompt_cost_more_as_they_attend_to_more():
    costs = StepTimeCosts(prefill_token_s=1.0, prefill_pair_s=0.1)
    # 4 tokens behind 10: 4 + 0.1 * (4 * 10 + 4 * 4 / 2) = 8.8
    assert tokens_within(8.8001, costs, [PrefillDemand(30, 10)], 100) == 4
    assert tokens_within(8.8001, costs, [PrefillDemand(30, 0)], 100) == 6  # 6 + 0.1 * 6 * 6 / 2 = 7.8


def test_a_step_is_as_large_as_its_target_allows():
    size = StepBudget(0.05, 512)
    for sample in steps(Random(7), 100):
        size.note(*sample)
    num_prefill = size.choose(16, 16 * 200, [PrefillDemand(1000, 300)]) - 16
    contents = [StepContents(count, count * (300 + count / 2), 16, 3200) for count in (num_prefill, num_prefill + 2)]
    assert MODEL.seconds(contents[0]) <= 0.0501 and MODEL.seconds(contents[1]) > 0.0499
    assert size.last == num_prefill + 16


def test_prompts_go_on_whatever_the_target():
    size = StepBudget(0.001, 512)
    assert size.choose(4, 400, [PrefillDemand(1000, 0)]) == 4 + FIRST_TOKENS  # nothing is known
    for sample in steps(Random(8), 100):
        size.note(*sample)
    decoding_s = MODEL.seconds(StepContents(num_decode=16, num_context=3200))
    num_prefill = size.choose(16, 3200, [PrefillDemand(1000, 0)]) - 16
    assert num_prefill * MODEL.prefill_token_s == pytest.approx(MOST_SHARE * decoding_s, rel=0.1)
    slow = StepBudget(0.05, 512)
    for _ in range(50):
        slow.note(StepContents(num_prefill=10, num_pairs=50), 100.0)
        slow.note(StepContents(num_decode=1, num_context=10), 0.01)
    assert slow.choose(1, 10, [PrefillDemand(1000, 0)]) == 1 + LEAST_TOKENS  # each of them takes ten seconds


def test_prompts_share_of_a_step_grows_as_answers_alone_come_to_miss_the_target():
    def share(decoding_of_target: float) -> float:
        size = StepBudget(decoding_s / decoding_of_target, 100_000)
        for sample in steps(Random(8), 100):
            size.note(*sample)
        wish = [PrefillDemand(100, 0)]  # too few tokens to stretch the target
        return (size.choose(16, 3200, wish) - 16) * MODEL.prefill_token_s / decoding_s

    decoding_s = MODEL.seconds(StepContents(num_decode=16, num_context=3200))
    shares = [share(part) for part in (0.25, 0.5, 0.75, 1.0, 2.0)]
    assert shares == pytest.approx([3.0, 1.0, 1.5, 2.0, 2.0], rel=0.1)  # the first: what is left of the target


def test_a_longer_target_never_leaves_prompts_less_whatever_answers_alone_take():
    slow = replace(MODEL, decode_row_s=3e-3)
    for num_decode in (1, 4, 8, 16, 32):
        chosen = []
        for target_ms in (10.0, 30.0, 50.0, 75.0, 100.0, 200.0):
            size = StepBudget(target_ms / 1e3, 100_000)
            for contents, _ in steps(Random(8), 100):
                size.note(contents, slow.seconds(contents))
            chosen.append(size.choose(num_decode, num_decode * 200, [PrefillDemand(100, 0)]) - num_decode)
        assert chosen[2:] == sorted(chosen[2:]), f"{num_decode} rows leave {chosen}"


def test_the_target_is_stretched_once_waiting_prompts_take_over_half_a_second():
    costs = StepTimeCosts(prefill_token_s=1e-3, prefill_pair_s=1e-6)
    assert stretch(costs, []) == stretch(costs, [PrefillDemand(300, 0)]) == 1  # 0.345 s
    assert stretch(costs, [PrefillDemand(500, 250)]) == pytest.approx(
        0.75 / PATIENCE_S
    )  # a third for what it attends to
    assert stretch(costs, [PrefillDemand(500, 0), PrefillDemand(100, 0)]) == pytest.approx(0.73 / PATIENCE_S)
    assert stretch(costs, [PrefillDemand(1000, 0)] * 9) == MOST_STRETCH


def test_a_long_line_is_not_walked_to_its_end_for_a_stretch():
    for costs in (
        StepTimeCosts(prefill_token_s=1e-3),
        StepTimeCosts(),
    ):  # enough soon; or never, as nothing costs anything
        line = iter([PrefillDemand(1000, 0)] * (MOST_INSPECTED + 5))
        assert stretch(costs, line) == (MOST_STRETCH if costs.prefill_token_s else 1)
        assert len(list(line)) >= 5


def test_prompts_in_line_make_room_for_more_of_the_first():
    size = StepBudget(0.05, 512)
    for sample in steps(Random(7), 100):
        size.note(*sample)
    alone, before_others = (
        size.choose(16, 3200, [PrefillDemand(1000, 300)], [PrefillDemand(1500, 0)] * number) for number in (0, 5)
    )
    assert before_others > 2.5 * alone


def test_what_is_left_open_depends_on_what_computes():
    native, torch = (resolve_step_size(EngineConfig(), is_native=is_native) for is_native in (True, False))
    assert (native.num_step_tokens, native.itl_target_ms) == (512, None)  # until the CPU is measured
    assert (torch.num_step_tokens, torch.itl_target_ms) == (2048, 0.0)
    whole = resolve_step_size(EngineConfig(enable_chunked_prefill=False), is_native=True)
    assert (whole.num_step_tokens, whole.itl_target_ms) == (2048, 0.0)
    assert resolve_step_size(EngineConfig(max_num_seqs=1000), is_native=True).num_step_tokens == 1000
    said = EngineConfig(max_num_batched_tokens=300, itl_target_ms=0.0)
    assert resolve_step_size(said, is_native=True) == said


def test_an_unset_target_is_the_time_of_a_chunk_that_keeps_a_cpu_busy_within_bounds():
    least_ms, most_ms = TARGETS_MS
    assert target_ms_for(0.075 / TARGET_TOKENS) == pytest.approx(75.0)
    assert target_ms_for(0.001 / TARGET_TOKENS) == least_ms and target_ms_for(1.0) == most_ms


def test_who_reads_whole_answers_has_no_target_unless_one_is_set():
    assert EngineConfig().for_whole_answers().itl_target_ms == 0.0
    assert EngineConfig(itl_target_ms=20.0).for_whole_answers().itl_target_ms == 20.0


@pytest.mark.parametrize("settings", [{"itl_target_ms": -1.0}, {"itl_target_ms": float("nan")}])
def test_a_target_that_is_no_time_is_refused(settings: dict[str, Any]):
    with pytest.raises(ConfigError, match="must be a number of milliseconds"):
        EngineConfig(**settings)


def test_a_target_needs_prompts_that_may_be_computed_in_parts():
    with pytest.raises(ConfigError, match="enable_chunked_prefill, or set it to 0"):
        EngineConfig(itl_target_ms=50.0, enable_chunked_prefill=False, max_num_batched_tokens=8192)


# -- in an engine, with the device's time from a cost model

ENGINE = replace(
    recorded_runs.ENGINE,
    num_blocks=2048,
    block_size=16,
    max_model_len=2048,
    max_num_seqs=16,
    max_num_batched_tokens=512,
    steps_in_flight=2,
)
STREAMS = [WorkloadRequest(0.01 * i, num_prompt=30, num_answer=500) for i in range(8)]
PROMPTS = [WorkloadRequest(0.5 + 0.4 * i, num_prompt=1000, num_answer=2) for i in range(20)]


def simulate(*requests: WorkloadRequest, target_ms: float) -> SimulationResult:
    simulation = Simulation(replace(ENGINE, itl_target_ms=target_ms), MODEL)
    result = simulation.run(Workload(requests, False))
    budget = simulation.core.schedule.scheduler.step_token_budget
    assert budget == 512 if not target_ms or len(requests) == 1 else LEAST_TOKENS < budget < 512
    return result


def test_long_prompts_delay_answers_by_no_more_than_the_target_and_finish_as_fast():
    free, held = (simulate(*STREAMS, *PROMPTS, target_ms=target_ms) for target_ms in (0.0, 50.0))
    gaps = [float(np.percentile(result.itl_s, 99)) for result in (free, held)]
    assert gaps[0] > 0.12 and gaps[1] <= 0.0505 and float(np.percentile(held.itl_s, 99.9)) < 0.08
    assert all(outcome.how == "finished" for outcome in held.outcomes)
    assert held.duration_s < 1.1 * free.duration_s  # the same work, in smaller parts
    ttft_s = [float(np.mean([each.ttft_s for each in result.outcomes[8:]])) for result in (free, held)]  # type: ignore[misc]
    assert ttft_s[1] < 1.6 * ttft_s[0]


def test_a_burst_of_prompts_gets_through_faster_than_the_target_alone_would_let_it(monkeypatch: pytest.MonkeyPatch):
    burst = [WorkloadRequest(0.5 + 0.01 * i, num_prompt=1000, num_answer=2) for i in range(8)]  # 2.8 s of computing
    stretched = simulate(*STREAMS, *burst, target_ms=20.0)
    monkeypatch.setattr("millrace.stages.schedule.step_timing.step_budget.MOST_STRETCH", 1.0)
    held = simulate(*STREAMS, *burst, target_ms=20.0)
    ttft_s = [float(np.mean([each.ttft_s for each in result.outcomes[8:]])) for result in (stretched, held)]  # type: ignore[misc]
    assert ttft_s[0] < 0.9 * ttft_s[1]
    longest_s = [float(np.percentile(result.itl_s, 99.5)) for result in (stretched, held)]
    assert longest_s[1] <= 0.022 < longest_s[0] <= 0.062
    through_s = [max(each.end_s or np.inf for each in result.outcomes[8:]) for result in (stretched, held)]
    assert through_s[0] < 0.9 * through_s[1]


def test_a_target_that_answers_alone_do_not_meet_starves_no_prompt():
    alone = simulate(*STREAMS, target_ms=1.0)
    crowded = simulate(*STREAMS, *PROMPTS, target_ms=1.0)
    assert all(outcome.how == "finished" for outcome in crowded.outcomes)
    assert float(np.percentile(crowded.itl_s, 99)) < (1 + MOST_SHARE) * 1.1 * float(np.percentile(alone.itl_s, 99))


def test_without_running_answers_a_prompt_is_computed_in_the_largest_steps():
    (outcome,) = simulate(WorkloadRequest(0.0, num_prompt=1024, num_answer=1), target_ms=1.0).outcomes
    pairs = 1024 * 1025 / 2
    expected_s = 2 * MODEL.step_s + 1024 * MODEL.prefill_token_s + pairs * MODEL.prefill_pair_s
    assert outcome.ttft_s == pytest.approx(expected_s)


# -- again, from a recording


def budgets(recording: Recording) -> set[int]:
    return {plan["token_budget"] for call in recording if isinstance(call, ScheduleCall) for plan in call.plans}


def test_sizes_that_were_chosen_by_times_are_chosen_again_from_a_recording(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    record(path, 24, config=replace(TIGHT, itl_target_ms=20.0))
    recording = Recording(path)
    assert recording.engine.itl_target_ms == 20.0 and len(budgets(recording)) > 2
    replay = Replay(recording).run()
    assert replay.difference is None and replay.num_decisions > 200
    lines = path.read_bytes().splitlines(keepends=True)
    told = orjson.loads(lines[0])
    told["engine"]["itl_target_ms"] = 40.0
    path.write_bytes(b"".join([orjson.dumps(told) + b"\n", *lines[1:]]))
    difference = Replay(Recording(path)).run().difference
    assert difference is not None and difference.decision == "plan"
