"""When the next step is planned: as late as it can be where somebody may come, yet so that no device waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import orjson
import pytest

from millrace.runtime.virtual import run_at_once
from millrace.stages import lead
from millrace.stages.lead import FIRST_SHARE, LEAST_S, LONG_STEPS_S, RETURN_S, SHORT_STEPS_S, Lead
from millrace.stages.messages import StepDone, StepGrant, StepVoid
from millrace.stages.recordings.cost_model import CostModel
from millrace.stages.recordings.film import film
from millrace.stages.recordings.modelled_device import ModelledDevice
from millrace.stages.recordings.recorded import Recording, ScheduleCall
from millrace.stages.recordings.replay import DEAF, Core, Replay
from millrace.stages.recordings.simulation import Result, Simulation
from millrace.stages.recordings.traces import Trace, TraceRequest
from millrace.stages.scheduler import Scheduler
from millrace.stages.step_costs import StepContents
from millrace.stages.step_size import StepSize
from tests.stages.plans import request
from tests.stages.recordings import TIGHT, record
from tests.stages.test_scheduler import Bench
from tests.stages.test_step_size import ENGINE, MODEL, STREAMS, steps

INFINITE = float("inf")


def early_until(told: Lead, expected_s: float, now_s: float) -> float | None:
    """When a plan is due that waits; None: it does not wait."""
    return told.due_s if told.is_early(expected_s, now_s) else None


# -- the rule


def test_beside_long_steps_a_plan_waits_until_shortly_before_their_end():
    told = Lead()
    told.note_begun(100.0)
    assert early_until(told, 0.08, 100.0) == pytest.approx(100.08 - FIRST_SHARE * 0.08)
    assert told.is_early(0.08, told.due_s - 0.002) and not told.is_early(0.08, told.due_s)
    assert FIRST_SHARE * LONG_STEPS_S > LEAST_S  # so that of the two the share is what counts there


def test_a_timer_that_rings_a_moment_too_early_is_not_set_again():
    told = Lead()
    told.note_begun(100.0)
    assert told.is_early(0.08, 100.0) and not told.is_early(0.08, told.due_s - 0.0005)


def test_beside_short_steps_a_plan_waits_only_for_a_moment_after_an_answer_has_ended():
    told = Lead()
    told.note_begun(100.0)
    short_s = (SHORT_STEPS_S + LONG_STEPS_S) / 2
    assert not told.is_early(short_s, 100.0)
    told.note_end(100.0)
    assert early_until(told, short_s, 100.0) == pytest.approx(100.0 + short_s - LEAST_S)
    told.note_begun(100.0 + RETURN_S)
    assert not told.is_early(short_s, 100.0 + RETURN_S)
    told.note_end(100.0 + RETURN_S)
    assert not told.is_early(0.9 * SHORT_STEPS_S, 100.0 + RETURN_S) and not told.is_early(0.0, 100.0 + RETURN_S)


@pytest.mark.parametrize("needed", [0.03, 0.15, 0.5])
def test_plans_are_made_as_early_as_it_takes_for_one_in_twenty_to_come_too_late(needed: float):
    told, dice, num_late = Lead(), Random(0), 0
    for number in range(3000):
        is_late = told.share < needed * dice.uniform(0.5, 1.0)  # what it takes differs from step to step
        told.note_planned(is_late=is_late)
        num_late += is_late and number >= 1000
    assert 0.5 * needed < told.share < 1.3 * needed
    assert 0.03 < num_late / 2000 < 0.08


def test_however_late_plans_come_some_still_wait_so_that_it_is_seen_when_they_need_not_be_early():
    told = Lead()
    for _ in range(100):
        told.note_planned(is_late=True)
    told.note_begun(100.0)
    assert told.is_early(0.08, 100.0)
    for _ in range(200):
        told.note_planned(is_late=False)
    assert told.share < FIRST_SHARE


def test_a_step_is_expected_to_take_what_steps_of_its_contents_took_once_a_size_was_chosen():
    size = StepSize(0.05, 512)
    for contents, seconds in steps(Random(0), 64):
        size.note(contents, seconds)
        assert size.expected_s(contents) == 0.0
    size.choose(4, 400, [])
    for contents, seconds in steps(Random(1), 20):
        assert size.expected_s(contents) == pytest.approx(seconds, rel=0.02)


# -- in an engine, in virtual time


def simulate(monkeypatch: pytest.MonkeyPatch, *requests: TraceRequest, waits: bool, model: CostModel = MODEL) -> Result:
    with monkeypatch.context() as patch:
        if not waits:
            patch.setattr(lead, "LONG_STEPS_S", INFINITE)
            patch.setattr(lead, "SHORT_STEPS_S", INFINITE)
        return Simulation(replace(ENGINE, itl_target_ms=50.0), model).run(Trace(requests, False))


def test_who_comes_while_long_steps_run_is_served_sooner_and_the_device_finds_its_plans_ready(
    monkeypatch: pytest.MonkeyPatch,
):
    idle_s: list[float] = []  # before each step, how long the device had nothing to do

    def launch(device: ModelledDevice, grant: StepGrant, now_s: float) -> None:
        idle_s.append(now_s - device._free_at_s)
        launch_now(device, grant, now_s)

    launch_now = ModelledDevice.launch
    monkeypatch.setattr(ModelledDevice, "launch", launch)
    dice = Random(0)
    prompts = [TraceRequest(0.5 + 0.05 * i + dice.uniform(0, 0.05), dice.randrange(40, 200), 2) for i in range(80)]
    at_once, late = (simulate(monkeypatch, *STREAMS, *prompts, waits=waits) for waits in (False, True))
    ttft_s = [float(np.median([each.ttft_s for each in result.outcomes[8:]])) for result in (at_once, late)]  # type: ignore[misc]
    assert ttft_s[1] < ttft_s[0] - 0.008  # the shortest step
    assert all(each.how == "finished" for result in (at_once, late) for each in result.outcomes)
    is_late = np.array(idle_s[-late.num_steps :]) >= 0.0  # the device had come to the end of the step before
    assert np.mean(is_late) < 0.08
    assert late.duration_s <= 1.001 * at_once.duration_s
    assert np.percentile(late.itl_s, 99) < 1.01 * np.percentile(at_once.itl_s, 99)


def test_a_client_that_sends_its_next_request_when_it_has_an_answer_waits_for_one_step_less(
    monkeypatch: pytest.MonkeyPatch,
):
    slow = replace(MODEL, decode_row_s=5e-4)  # steps of 13 ms
    others = [TraceRequest(0.0, num_prompt=20, num_answer=200) for _ in range(15)]
    others += [TraceRequest(0.3, num_prompt=30, num_answer=100)]  # when sizes are first chosen
    end_s = simulate(monkeypatch, *others, waits=True, model=slow).outcomes[15].end_s
    assert end_s is not None
    again = [*others, TraceRequest(end_s + 0.004, num_prompt=100, num_answer=10)]
    at_once, late = (
        simulate(monkeypatch, *again, waits=waits, model=slow).outcomes[16].ttft_s for waits in (False, True)
    )
    assert at_once is not None and late is not None
    assert late < at_once - 0.012


def teach_costs(scheduler: Scheduler, a_token_s: float = 1e-3) -> None:
    """So that it knows what a prompt takes, and a row next to nothing."""
    size = scheduler._step_size
    assert size is not None
    for num_tokens in (16, 64, 128, 256):
        size.note(StepContents(num_tokens, num_tokens**2 / 2), a_token_s * num_tokens)
    size.choose(1, 1, [])


def begun() -> tuple[Core, StepGrant]:
    """An engine at 5 s that has begun with a step of 100 ms, and whose next plan waits; and that step."""
    core = Core(replace(ENGINE, itl_target_ms=50.0))
    core.env.time_s = 5.0
    teach_costs(core.schedule.scheduler)
    (plan,), _ = core.run_schedule([request(0, 100)])
    ((grant, report),) = core.run_allocate([plan])
    assert grant is not None
    assert core.run_schedule([report])[0] == []
    assert core.env.next_alarm_s == pytest.approx(5.08, abs=0.005)
    return core, grant


def done(grant: StepGrant, place: int = 0) -> StepDone:
    numbers = (np.array([0], np.int64), np.array([place], np.int32), np.array([7], np.int32))
    return StepDone(grant.step, grant.slots, *numbers, np.array([False]), took_us=100_000)


def test_a_plan_that_waits_is_made_though_nothing_comes_and_whoever_comes_before_is_in_it():
    core, _ = begun()
    core.env.time_s = 5.01
    assert core.run_schedule([request(1, 30)])[0] == []
    core.env.time_s = core.env.next_alarm_s
    assert not core.lane.is_rung
    core.env.ring()
    assert core.lane.is_rung and core.env.next_alarm_s == INFINITE
    (plan,), _ = core.run_schedule([])
    assert len(plan.slots) == 2 and not core.lane.is_rung
    assert core.schedule.lead.share < FIRST_SHARE


def test_a_step_that_is_done_before_its_successor_is_planned_has_that_planned_at_once_and_plans_come_earlier_then():
    core, grant = begun()
    core.env.time_s = 5.05
    (plan,), _ = core.run_schedule([done(grant)])
    assert len(plan.slots) == 1 and core.env.next_alarm_s == INFINITE
    assert core.schedule.lead.share > FIRST_SHARE


def test_a_step_that_fails_while_a_plan_waits_is_planned_anew_at_once():
    core, grant = begun()
    (plan,), _ = core.run_schedule([StepVoid(grant.step, grant.generation, MemoryError())])
    assert plan.voided == [grant.step] and core.env.next_alarm_s == INFINITE


def test_a_stage_that_crashes_while_its_plan_waits_still_makes_it():
    core, _ = begun()
    log, core.schedule.call_log = core.schedule.call_log, None
    run_at_once(core.schedule.recover([], RuntimeError("a bug"), DEAF))
    core.schedule.call_log = log
    assert core.env.next_alarm_s < 5.1
    core.env.time_s = core.env.next_alarm_s
    core.env.ring()
    (plan,), _ = core.run_schedule([])
    assert plan.dropped == [0]  # what ran is computed anew


def test_a_stage_that_has_ended_is_not_called_for_a_plan_that_waited():
    core, _ = begun()
    run_at_once(core.schedule.teardown())
    assert core.env.next_alarm_s == INFINITE


def test_of_three_steps_in_flight_the_last_waits_and_the_second_does_not():
    bench = Bench(steps_in_flight=3, itl_target_ms=50.0, max_num_batched_tokens=8)
    scheduler = bench.scheduler
    teach_costs(scheduler)
    scheduler.add(request(0, 20, max_tokens=20))
    seen = []
    for _ in range(4):
        seen.append((scheduler.has_credit, scheduler.has_last_credit, scheduler.expected_s))
        bench.plan()
    assert [each[:2] for each in seen] == [(True, False), (True, False), (True, True), (False, False)]
    expected_s = [each[2] for each in seen]
    assert expected_s[0] == 0.0 and expected_s[1:3] == pytest.approx([8e-3, 16e-3], rel=0.05)  # 8 tokens a step


def test_steps_that_fell_with_one_that_failed_are_no_work_to_wait_for():
    bench = Bench(steps_in_flight=3, itl_target_ms=50.0, max_num_batched_tokens=8)
    teach_costs(bench.scheduler)
    bench.scheduler.add(request(0, 20, max_tokens=20))
    grant = bench.plan()[1]
    bench.plan()
    assert grant is not None and bench.scheduler.expected_s > 0.0
    bench.scheduler.on_void(StepVoid(grant.step, grant.generation, MemoryError()))
    assert bench.scheduler.num_in_flight == 1 and bench.scheduler.expected_s == 0.0


# -- again, from a recording


def record_waits(path: Path) -> Recording:
    record(path, 24, config=replace(TIGHT, itl_target_ms=40.0), device_s=(0.02, 0.08))
    return Recording(path)


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> Recording:
    """With each line changed."""
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        change(line)
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return Recording(path)


def test_a_recording_says_which_plans_waited_and_is_run_again_by_that(tmp_path: Path):
    recording = record_waits(tmp_path / "run.jsonl")
    assert sum(isinstance(call, ScheduleCall) and call.is_early for call in recording) > 20
    replay = Replay(recording).run()
    assert replay.difference is None and replay.num_decisions > 200
    forgetful = rewrite(recording.path, lambda line: line.get("schedule", {}).pop("is_early", None))
    difference = Replay(forgetful).run().difference
    assert difference is not None and difference.decision == "plan"


def test_a_recording_from_before_any_plan_waited_is_read_as_one_in_which_none_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lead, "LONG_STEPS_S", INFINITE)
    monkeypatch.setattr(lead, "SHORT_STEPS_S", INFINITE)
    recording = record_waits(tmp_path / "run.jsonl")
    monkeypatch.undo()
    now = Replay(recording).run()
    then = rewrite(recording.path, lambda line: line.update({"millrace_recording": 2}) if "engine" in line else None)
    for replay in (now, Replay(then).run()):
        assert replay.difference is None and replay.decision_hash == now.decision_hash and replay.num_decisions > 200
    assert film(then).trouble is None


def test_a_copy_of_a_replay_is_told_when_to_wait_by_itself(tmp_path: Path):
    recording = record_waits(tmp_path / "run.jsonl")
    whole, half = Replay(recording).run(), Replay(recording)
    calls = list(recording)
    for call in calls[: len(calls) // 2]:
        half.take(call)
    for replay in (half, half.copy()):
        for call in calls[len(calls) // 2 :]:
            replay.take(call)
        assert replay.difference is None and replay.decision_hash == whole.decision_hash


def test_a_film_of_a_recording_in_which_plans_waited_is_whole(tmp_path: Path):
    assert film(record_waits(tmp_path / "run.jsonl")).trouble is None
