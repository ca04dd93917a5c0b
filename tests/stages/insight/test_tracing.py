"""The trace of an engine, read afterwards."""

from __future__ import annotations

from typing import Any

from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.runtime.trace.tracer import EventKind, request_names, token_times
from millrace.stages import SamplingParams
from millrace.stages.testing.scripted.engine import Script, scripted_engine

NEVER_ENDS = Script(eos_probability=0.0)


async def traced(env: SimEnv, **params: Any) -> Any:
    async with scripted_engine(script=NEVER_ENDS, env=env) as engine:
        async for _ in engine.generate([3, 4, 5], SamplingParams(**params), request_id="the-request"):
            pass
        return engine.pipeline.tracer.read_all()


@sim_test(seeds=3)
async def test_every_token_of_a_request_has_a_time_without_a_record_per_token(env: SimEnv):
    records = await traced(env, max_tokens=30)
    (times,) = token_times(records).values()
    assert len(times) == 30
    assert len(records[records["kind"] == EventKind.ROW_DECODE]) <= 2


@sim_test(seeds=3)
async def test_a_request_is_traced_by_name_from_its_acceptance_to_its_end(env: SimEnv):
    records = await traced(env, max_tokens=2)
    assert list(request_names(records).values()) == ["the-request"]
    (finished,) = records[records["kind"] == EventKind.REQUEST_FINISHED]
    assert (finished["c"], finished["d"]) == (3, 2)  # prompt tokens, answer tokens


@sim_test(seeds=3)
async def test_each_step_is_planned_granted_executed_sampled_and_done_in_that_order(env: SimEnv):
    records = await traced(env, max_tokens=5)
    names = ["STEP_PLANNED", "STEP_GRANTED", "STEP_EXECUTED", "STEP_SAMPLED", "STEP_DONE"]
    for step in range(5):
        of_step = records[(records["step"] == step) & (records["kind"] >= 16) & (records["kind"] < 22)]
        assert [EventKind(kind).name for kind in of_step["kind"]] == names


@sim_test(seeds=3, policies=("fifo",), thread_delay_s=(0.001, 0.002))
async def test_in_steady_decoding_schedule_wakes_once_a_step(env: SimEnv):
    async with scripted_engine(script=NEVER_ENDS, env=env) as engine:
        async for _ in engine.generate([3, 4, 5], SamplingParams(max_tokens=100)):
            pass
        schedule, records = engine.pipeline.tracer.source("schedule"), engine.pipeline.tracer.read_all()
    batches = records[(records["kind"] == EventKind.STAGE_BATCH) & (records["source"] == schedule)]
    steps = records[records["kind"] == EventKind.STEP_DONE]
    assert len(steps) >= 100 and len(batches) < 1.2 * len(steps)
