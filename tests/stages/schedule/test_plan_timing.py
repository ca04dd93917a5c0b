"""Plan timing: as late as possible where a request may arrive, but seldom so late that the device waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import orjson
import pytest

from millrace.runtime.simulation.manual_env import run_at_once
from millrace.stages.messages import StepDone, StepGrant, StepVoid
from millrace.stages.recordings.cost_model import CostModel
from millrace.stages.recordings.film import film
from millrace.stages.recordings.reader import Recording, ScheduleCall
from millrace.stages.recordings.replay import DEAF, Replay, ReplayedCore
from millrace.stages.recordings.simulated_device import SimulatedDevice
from millrace.stages.recordings.simulation import Simulation
from millrace.stages.recordings.simulation_result import SimulationResult
from millrace.stages.recordings.workloads import Workload, WorkloadRequest
from millrace.stages.schedule.scheduler import Scheduler
from millrace.stages.schedule.step_timing import plan_timing
from millrace.stages.schedule.step_timing.plan_timing import (
    FIRST_SHARE,
    LEAST_S,
    LONG_STEP_S,
    RETURN_S,
    SHORT_STEP_S,
    PlanTimer,
)
from millrace.stages.schedule.step_timing.step_budget import StepBudget
from millrace.stages.schedule.step_timing.step_time_model import StepContents
from tests.stages.recorded_runs import TIGHT, record
from tests.stages.schedule.plans import request
from tests.stages.schedule.test_step_budget import ENGINE, MODEL, STREAMS, steps

INFINITE = float("inf")


def early_until(told: PlanTimer, expected_s: float, now_s: float) -> float | None:
    """When a plan is due that waits; None: it does not wait."""
    return told.due_s if told.is_early(expected_s, now_s) else None


# -- the rule


def test_beside_a_long_step_a_plan_waits_until_shortly_before_its_end():
    told = PlanTimer()
    told.note_started(100.0)
    assert early_until(told, 0.08, 100.0) == pytest.approx(100.08 - FIRST_SHARE * 0.08)
    assert told.is_early(0.08, told.due_s - 0.002) and not told.is_early(0.08, told.due_s)
    assert FIRST_SHARE * LONG_STEP_S > LEAST_S  # so that of the two the share is what counts there


def test_a_timer_that_rings_a_moment_too_early_is_not_set_again():
    told = PlanTimer()
    told.note_started(100.0)
    assert told.is_early(0.08, 100.0) and not told.is_early(0.08, told.due_s - 0.0005)


def test_during_a_short_step_a_plan_waits_only_shortly_after_an_answer_has_ended():
    told = PlanTimer()
    told.note_started(100.0)
    short_s = (SHORT_STEP_S + LONG_STEP_S) / 2
    assert not told.is_early(short_s, 100.0)
    told.note_end(100.0)
    assert early_until(told, short_s, 100.0) == pytest.approx(100.0 + short_s - LEAST_S)
    told.note_started(100.0 + RETURN_S)
    assert not told.is_early(short_s, 100.0 + RETURN_S)
    told.note_end(100.0 + RETURN_S)
    assert not told.is_early(0.9 * SHORT_STEP_S, 100.0 + RETURN_S) and not told.is_early(0.0, 100.0 + RETURN_S)


@pytest.mark.parametrize("needed", [0.1, 0.3, 0.6])
def test_plans_are_made_so_early_that_about_one_in_eighteen_comes_too_late(needed: float):
    told, dice, num_late = PlanTimer(), Random(0), 0
    for number in range(3000):
        is_late = told.share < needed * dice.uniform(0.5, 1.0)  # the needed lead time varies
        told.note_waited(is_late=is_late)
        num_late += is_late and number >= 1000
    assert 0.5 * needed < told.share < 1.3 * needed
    assert 0.03 < num_late / 2000 < 0.08


def test_the_lead_time_stays_within_bounds_and_soon_adapts_when_plans_come_late():
    told = PlanTimer()
    for _ in range(100):
        told.note_waited(is_late=True)
    told.note_started(100.0)
    assert told.is_early(LONG_STEP_S, 100.0)
    for _ in range(5000):
        told.note_waited(is_late=False)
    assert told.share < FIRST_SHARE
    for _ in range(6):
        told.note_waited(is_late=True)
    assert told.share > FIRST_SHARE


def test_a_step_is_expected_to_take_what_like_steps_took_once_a_size_was_chosen():
    size = StepBudget(0.05, 512)
    for contents, seconds in steps(Random(0), 64):
        size.note(contents, seconds)
        assert size.expected_s(contents) == 0.0
    size.choose(4, 400, [])
    for contents, seconds in steps(Random(1), 20):
        assert size.expected_s(contents) == pytest.approx(seconds, rel=0.02)


# -- in an engine, in virtual time


def simulate(
    monkeypatch: pytest.MonkeyPatch, *requests: WorkloadRequest, waits: bool, model: CostModel = MODEL
) -> SimulationResult:
    with monkeypatch.context() as patch:
        if not waits:
            patch.setattr(plan_timing, "LONG_STEP_S", INFINITE)
            patch.setattr(plan_timing, "SHORT_STEP_S", INFINITE)
        return Simulation(replace(ENGINE, itl_target_ms=50.0), model).run(Workload(requests, False))


def test_requests_in_long_steps_are_served_sooner_and_plans_are_nearly_always_ready(
    monkeypatch: pytest.MonkeyPatch,
):
    has_come_late: list[bool] = []  # each step: the device had come to the end of the one before

    def launch(device: SimulatedDevice, grant: StepGrant, now_s: float) -> None:
        has_come_late.append(now_s >= device._free_at_s)
        launch_now(device, grant, now_s)

    launch_now = SimulatedDevice.launch
    monkeypatch.setattr(SimulatedDevice, "launch", launch)
    dice = Random(0)
    prompts = [WorkloadRequest(0.5 + 0.05 * i + dice.uniform(0, 0.05), dice.randrange(40, 200), 2) for i in range(80)]
    at_once = simulate(monkeypatch, *STREAMS, *prompts, waits=False)
    has_come_late.clear()
    late = simulate(monkeypatch, *STREAMS, *prompts, waits=True)
    ttft_s = [float(np.median([each.ttft_s for each in result.outcomes[8:]])) for result in (at_once, late)]  # type: ignore[misc]
    assert ttft_s[1] < ttft_s[0] - 0.008  # the shortest step
    assert all(each.how == "finished" for result in (at_once, late) for each in result.outcomes)
    assert np.mean(has_come_late) < 0.08
    assert late.duration_s <= 1.001 * at_once.duration_s
    assert np.percentile(late.itl_s, 99) < 1.01 * np.percentile(at_once.itl_s, 99)


def test_a_client_that_sends_its_next_request_on_an_answer_waits_one_step_less(
    monkeypatch: pytest.MonkeyPatch,
):
    slow = replace(MODEL, decode_row_s=5e-4)  # steps of 13 ms
    others = [WorkloadRequest(0.0, num_prompt=20, num_answer=200) for _ in range(15)]
    others += [WorkloadRequest(0.3, num_prompt=30, num_answer=100)]  # when sizes are first chosen
    end_s = simulate(monkeypatch, *others, waits=True, model=slow).outcomes[15].end_s
    assert end_s is not None
    again = [*others, WorkloadRequest(end_s + 0.004, num_prompt=100, num_answer=10)]
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


def begun(steps_in_flight: int = 2, max_tokens: int = 5) -> tuple[ReplayedCore, StepGrant]:
    """An engine at 5 s that has begun with a step of 100 ms, and whose last plan waits; and that step."""
    core = ReplayedCore(replace(ENGINE, itl_target_ms=50.0, steps_in_flight=steps_in_flight))
    core.env.time_s = 5.0
    teach_costs(core.schedule.scheduler)
    plans, _ = core.run_schedule([request(0, 100, max_tokens=max_tokens)])
    grants = []
    for _ in range(steps_in_flight - 1):
        ((grant, report),) = core.run_allocate(plans)
        assert grant is not None
        grants.append(grant)
        plans, _ = core.run_schedule([report])
    assert plans == [] and core.schedule.scheduler.num_in_flight == steps_in_flight - 1
    grant = grants[0]
    assert core.env.next_alarm_s == pytest.approx(5.08, abs=0.005)
    return core, grant


def done(grant: StepGrant, *, is_finished: bool = False) -> StepDone:
    numbers = (np.array([0], np.int64), np.array([0], np.int32), np.array([7], np.int32))
    return StepDone(grant.step, grant.slots, *numbers, np.array([is_finished]), took_us=100_000)


def ring(core: ReplayedCore) -> None:
    """The time has come that the next plan is due."""
    core.env.time_s = core.env.next_alarm_s
    assert not core.lane.is_set
    core.env.ring()
    assert core.lane.is_set and core.env.next_alarm_s == INFINITE


def test_a_delayed_plan_is_made_though_nothing_comes_and_includes_new_requests():
    core, grant = begun()
    core.env.time_s = 5.01
    assert core.run_schedule([request(1, 30)])[0] == []
    ring(core)
    (plan,), _ = core.run_schedule([])
    assert len(plan.slots) == 2 and not core.lane.is_set
    ((_, report),) = core.run_allocate([plan])
    core.run_schedule([report, done(grant)])
    assert core.schedule.plan_timer.share < FIRST_SHARE  # it need not have been made so early


def test_a_step_done_before_the_next_plan_has_it_made_at_once_and_later_ones_sooner():
    core, grant = begun()
    core.env.time_s = 5.05
    (plan,), _ = core.run_schedule([done(grant)])
    assert len(plan.slots) == 1 and core.env.next_alarm_s == INFINITE
    assert core.schedule.plan_timer.share > FIRST_SHARE


def test_a_plan_that_allocate_still_has_when_the_device_is_done_was_made_too_late():
    core, grant = begun()
    ring(core)
    assert len(core.run_schedule([])[0]) == 1
    core.run_schedule([done(grant)])
    assert core.schedule.plan_timer.share > FIRST_SHARE


def test_where_nothing_is_left_to_run_no_plan_was_late():
    core, grant = begun()
    core.lane.post(0, "cancel")
    core.run_schedule([])
    plans, _ = core.run_schedule([done(grant)])
    assert not any(len(plan.slots) for plan in plans)
    assert core.schedule.plan_timer.share == FIRST_SHARE
    core, grant = begun(max_tokens=1)
    core.run_schedule([done(grant, is_finished=True)])
    assert core.schedule.plan_timer.share == FIRST_SHARE


def test_a_step_that_fails_during_a_delay_is_replanned_at_once_and_teaches_nothing():
    core, grant = begun()
    (plan,), _ = core.run_schedule([StepVoid(grant.step, grant.generation, MemoryError())])
    assert plan.voided == [grant.step] and core.env.next_alarm_s == INFINITE
    assert core.schedule.plan_timer.share == FIRST_SHARE


def test_a_stage_that_crashes_while_its_plan_waits_still_makes_it():
    core, grant = begun()
    log, core.schedule.call_log = core.schedule.call_log, None
    run_at_once(core.schedule.recover([], RuntimeError("a bug"), DEAF))
    core.schedule.call_log = log
    ring(core)
    (plan,), _ = core.run_schedule([])
    assert plan.dropped == [0]  # what ran is computed anew
    ((_, report),) = core.run_allocate([plan])
    (plan,), _ = core.run_schedule([report, done(grant)])
    assert len(plan.slots) == 1


def test_a_stage_that_has_ended_is_not_called_for_a_plan_that_waited():
    core, _ = begun()
    run_at_once(core.schedule.teardown())
    assert core.env.next_alarm_s == INFINITE


def test_of_three_steps_in_flight_the_last_waits_and_the_second_does_not():
    core, _ = begun(steps_in_flight=3)
    ring(core)
    (plan,), _ = core.run_schedule([])
    assert plan.step == 2


def test_a_step_that_fell_with_one_that_failed_is_no_work_to_wait_for():
    core, grant = begun(steps_in_flight=3)
    scheduler = core.schedule.scheduler
    assert scheduler.expected_s == pytest.approx(0.1, rel=0.05)
    (plan,), _ = core.run_schedule([StepVoid(grant.step, grant.generation, MemoryError())])
    assert scheduler.num_in_flight == 1 and scheduler.expected_s == 0.0
    assert plan.voided == [grant.step]


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


def test_a_film_of_a_recording_in_which_plans_waited_is_whole(tmp_path: Path):
    assert film(record_waits(tmp_path / "run.jsonl")).trouble is None
