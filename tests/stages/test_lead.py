"""When the next step is planned: as late as it can be where somebody may come, yet so that no device waits for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from millrace.stages import lead
from millrace.stages.lead import LEAD_S, LEAD_SHARE, LONG_S, RETURN_S, SHORT_S, Lead
from millrace.stages.messages import TokenRequest
from millrace.stages.params import SamplingParams
from millrace.stages.recordings.cost_model import CostModel
from millrace.stages.recordings.recorded import Recording, ScheduleCall
from millrace.stages.recordings.replay import Core, Replay
from millrace.stages.recordings.simulation import Result, Simulation
from millrace.stages.recordings.traces import Trace, TraceRequest
from millrace.stages.step_costs import StepContents
from millrace.stages.step_size import StepSize
from tests.stages.recordings import TIGHT, record
from tests.stages.test_step_size import ENGINE, MODEL, STREAMS, steps

INFINITE = float("inf")


def holds(told: Lead, expected_s: float, now_s: float, *, has_credit: bool = True) -> bool:
    scheduler: Any = SimpleNamespace(has_credit=has_credit, expected_s=expected_s)
    return told.holds(scheduler, now_s)


# -- the rule


def test_beside_a_long_step_a_plan_waits_until_shortly_before_its_end():
    told = Lead()
    told.note_begun(100.0)
    assert holds(told, 0.08, 100.0) and told.due_s == pytest.approx(100.08 - LEAD_SHARE * 0.08)
    assert holds(told, 0.08, told.due_s - 1e-6) and not holds(told, 0.08, told.due_s)
    assert LEAD_SHARE * LONG_S > LEAD_S  # so that of the two the share is what counts there


def test_beside_a_short_step_a_plan_waits_only_for_a_moment_after_an_answer_has_ended():
    told = Lead()
    told.note_begun(100.0)
    short_s = (SHORT_S + LONG_S) / 2
    assert not holds(told, short_s, 100.0)
    told.note_end(100.0)
    assert holds(told, short_s, 100.0) and told.due_s == pytest.approx(100.0 + short_s - LEAD_S)
    told.note_begun(100.0 + RETURN_S)
    assert not holds(told, short_s, 100.0 + RETURN_S)
    told.note_end(100.0 + RETURN_S)
    assert not holds(told, 0.9 * SHORT_S, 100.0 + RETURN_S)


@pytest.mark.parametrize(("expected_s", "has_credit"), [(0.0, True), (1.0, False)])
def test_nothing_waits_where_no_step_runs_or_none_could_be_planned(expected_s: float, has_credit: bool):
    told = Lead()
    told.note_end(0.0)
    assert not holds(told, expected_s, 0.0, has_credit=has_credit)


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
            patch.setattr(lead, "LONG_S", INFINITE)
            patch.setattr(lead, "SHORT_S", INFINITE)
        return Simulation(replace(ENGINE, itl_target_ms=50.0), model).run(Trace(requests, False))


def test_who_comes_while_long_steps_run_is_served_sooner_and_the_device_waits_for_no_plan(
    monkeypatch: pytest.MonkeyPatch,
):
    dice = Random(0)
    prompts = [TraceRequest(0.5 + 0.05 * i + dice.uniform(0, 0.05), dice.randrange(40, 200), 2) for i in range(80)]
    at_once, late = (simulate(monkeypatch, *STREAMS, *prompts, waits=waits) for waits in (False, True))
    ttft_s = [float(np.median([each.ttft_s for each in result.outcomes[8:]])) for result in (at_once, late)]  # type: ignore[misc]
    assert ttft_s[1] < ttft_s[0] - 0.008  # the shortest step
    for result in (at_once, late):
        assert all(each.how == "finished" for each in result.outcomes)
        assert result.busy_s > 0.999 * result.duration_s
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


def test_a_plan_that_waits_is_made_though_nothing_comes_and_whatever_comes_before_is_in_it():
    core = Core(replace(ENGINE, itl_target_ms=50.0))
    core.env.time_s = 5.0
    size = core.schedule.scheduler._step_size
    assert size is not None
    for num_tokens in (16, 64, 128, 256):
        size.note(StepContents(num_tokens, num_tokens**2 / 2), 1e-3 * num_tokens)
    size.choose(1, 1, [])
    params = SamplingParams(max_tokens=5)

    def request(number: int, num_tokens: int) -> TokenRequest:
        return TokenRequest(str(number), 0, np.arange(num_tokens, dtype=np.int32), params, number)

    (plan,), _ = core.run_schedule([request(0, 100)])
    ((grant, report),) = core.run_allocate([plan])
    assert grant is not None
    assert core.run_schedule([report])[0] == []
    assert core.env.next_alarm_s == pytest.approx(5.08, abs=0.005)
    core.env.time_s = 5.01
    assert core.run_schedule([request(1, 30)])[0] == []
    core.env.time_s = core.env.next_alarm_s
    assert not core.lane.is_rung
    core.env.ring()
    assert core.lane.is_rung and core.env.next_alarm_s == INFINITE
    (plan,), _ = core.run_schedule([])
    assert len(plan.slots) == 2 and not core.lane.is_rung


# -- again, from a recording


def test_a_recording_says_which_plans_waited_and_is_run_again_by_that(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    record(path, 24, config=replace(TIGHT, itl_target_ms=40.0), device_s=(0.02, 0.08))
    calls = [call for call in Recording(path) if isinstance(call, ScheduleCall)]
    held = [call for call in calls if call.is_held]
    assert len(held) > 20 and not any(call.plans for call in held)
    replay = Replay(Recording(path)).run()
    assert replay.difference is None and replay.num_decisions > 200
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        line.get("schedule", {}).pop("is_held", None)
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    difference = Replay(Recording(path)).run().difference
    assert difference is not None and difference.decision == "plan"


def test_a_copy_of_a_replay_is_told_when_to_wait_by_itself(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    record(path, 24, config=replace(TIGHT, itl_target_ms=40.0), device_s=(0.02, 0.08))
    whole = Replay(Recording(path)).run()
    half = Replay(Recording(path))
    calls = list(half.recording)
    for call in calls[: len(calls) // 2]:
        half.take(call)
    other = half.copy()
    for replay in (half, other):
        for call in calls[len(calls) // 2 :]:
            replay.take(call)
        assert replay.difference is None and replay.decision_hash == whole.decision_hash
