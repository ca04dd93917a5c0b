"""Which stage a moment of time counts for: the counters of the runners, and the shares from the trace."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.runtime.trace.tracer import EventKind, Tracer
from millrace.stages import SamplingParams
from millrace.stages.insight.bottleneck import WindowLoad, load_of
from millrace.stages.insight.trace_view import TraceView
from millrace.stages.insight.waterfall import waterfall
from millrace.stages.testing.scripted.engine import Script, ScriptedEngine, scripted_engine

NEVER_ENDS = Script(eos_probability=0.0)
JOB_S = 0.001  # of a forward pass, and of sampling


async def ask(engine: ScriptedEngine, *, streams: int = 4, max_tokens: int = 100) -> None:
    async def one(number: int) -> None:
        async for _ in engine.generate([3, 4, 5 + number], SamplingParams(max_tokens=max_tokens)):
            pass

    await asyncio.gather(*(one(number) for number in range(streams)))


def view_of(engine: ScriptedEngine) -> TraceView:
    return TraceView(engine.pipeline.tracer.read_all(), engine.pipeline.tracer.names())


def load(engine: ScriptedEngine, window_s: float) -> WindowLoad:
    return load_of(view_of(engine), engine.pipeline.env.now_ns(), window_s)


def lives(engine: ScriptedEngine) -> dict[str, Any]:
    return {name: runner.times for name, runner in engine.pipeline.runners.items()}


@sim_test(seeds=3, policies=("fifo",), thread_delay_s=(JOB_S, JOB_S))
async def test_the_wait_of_sample_for_a_forward_pass_counts_for_execute(env: SimEnv):
    async with scripted_engine(script=NEVER_ENDS, env=env) as engine:
        began_s, before = env.now(), lives(engine)
        await ask(engine)
        passed_s, after = env.now() - began_s, lives(engine)
        spent = {name: after[name].busy - before[name].busy for name in after}
        num_steps = len(view_of(engine).of(EventKind.STEP_DONE))
        assert spent["execute"] == pytest.approx(num_steps * JOB_S, rel=0.05)
        assert spent["sample"] == pytest.approx(num_steps * JOB_S, rel=0.1)
        assert spent["execute"] + spent["sample"] <= 1.01 * passed_s
        for name, times in after.items():
            life_s = sum(getattr(times, part) - getattr(before[name], part) for part in ("idle", "busy", "blocked"))
            assert life_s == pytest.approx(passed_s, rel=1e-6), name
        service = engine.pipeline.runners["execute"].service_us
        assert service.num_observed == num_steps and service.total == pytest.approx(1e6 * spent["execute"], rel=0.01)


@sim_test(seeds=3, policies=("fifo",))
async def test_an_asynchronous_device_counts_for_execute_until_it_has_finished(env: SimEnv):
    async with scripted_engine(script=NEVER_ENDS, env=env, is_async=True, steps_in_flight=2) as engine:
        began_s, before = env.now(), lives(engine)
        await ask(engine)
        passed_s, after = env.now() - began_s, lives(engine)
        executed, done = view_of(engine).of(EventKind.STEP_EXECUTED), view_of(engine).of(EventKind.STEP_DONE)
        ended = dict(zip(executed["step"].tolist(), executed["time_ns"].tolist(), strict=True))
        assert all(ended[step] <= at for step, at in zip(done["step"].tolist(), done["time_ns"].tolist(), strict=True))
        busy = {name: after[name].busy - before[name].busy for name in after}
        assert 0.8 * passed_s < busy["execute"] <= 1.001 * passed_s
        assert busy["sample"] < 0.1 * passed_s
        assert not view_of(engine).of(EventKind.STEP_SAMPLED)["b"].any()
        fall = waterfall(view_of(engine), 0)
        assert fall is not None and fall.total_ns("service", "execute") > 5 * fall.total_ns("service", "sample")


@sim_test(seeds=2, policies=("fifo",), thread_delay_s=(JOB_S, JOB_S))
async def test_the_shares_of_a_window_are_those_of_the_counters(env: SimEnv):
    async with scripted_engine(script=NEVER_ENDS, env=env) as engine:
        await ask(engine, streams=2, max_tokens=20)
        await engine.refresh()
        began_s, before = env.now(), lives(engine)
        await ask(engine)
        await engine.refresh()  # as each reader of the shares does
        passed_s, after = env.now() - began_s, lives(engine)
        found = load(engine, passed_s)
        for name, times in after.items():
            busy = (times.busy - before[name].busy) / passed_s
            assert found.busy.get(name, 0.0) == pytest.approx(busy, abs=0.002), name
        assert found.device == pytest.approx(found.busy["execute"] + found.busy["sample"], abs=0.01)


@sim_test(seeds=1, policies=("fifo",))
async def test_a_record_that_begins_before_the_window_counts_by_its_part_in_it(env: SimEnv):
    async with scripted_engine(env=env) as engine:
        tracer = engine.pipeline.tracer
        tracer.emit(EventKind.LOOP_LAG, tracer.source("loop"))  # from here on it is known what was
        await asyncio.sleep(10.0)
        tracer.emit(EventKind.STAGE_TIME, tracer.source("tokenize"), 0, 3_000_000, 1_000_000, 0)
        await asyncio.sleep(1.0)
        found = load(engine, 3.0)  # 2 of the 4 seconds lie in it
        assert found.busy == {"tokenize": pytest.approx(0.5)} and found.blocked == {"tokenize": pytest.approx(1 / 6)}


def test_shares_of_several_engines_are_averages_and_what_waits_is_added() -> None:
    now_ns = 0
    tracer = Tracer()
    tracer._now_ns = lambda: now_ns
    schedule, execute, tokenize, edge = map(
        tracer.source, ("schedule", "execute", "tokenize", "allocate.out->execute.in")
    )

    def seconds(first: int, num_engines: int) -> WindowLoad:
        """A second in which each engine makes ten steps, and computes for nine tenths of the time."""
        nonlocal now_ns
        now_ns += 1  # the last records of the second before are not in this one
        for number in range(10):
            for engine in range(num_engines):
                now_ns += 1_000_000_000 // (10 * num_engines)
                step = engine * (1 << 26) + first + number
                tracer.emit(EventKind.STEP_PLANNED, schedule, step, 1, 1, 0, 3 + engine)
                tracer.emit(EventKind.STEP_GRANTED, execute, step, 1, 1, 1, 9)
                tracer.emit(EventKind.STAGE_TIME, execute, 0, 90_000, 10_000, 0)
                tracer.emit(EventKind.EDGE_DEPTH, edge, 0, 1, 1, 1, 60_000)
        tracer.emit(EventKind.STAGE_TIME, tokenize, 0, 400_000, 0, 600_000)
        return load_of(TraceView(tracer.read_all(), tracer.names()), now_ns, 1.0)

    for first, num_engines in ((0, 1), (100, 2), (200, 3), (300, 1)):
        load = seconds(first, num_engines)
        assert load.busy == pytest.approx({"execute": 0.9, "tokenize": 0.4}, abs=0.05)
        assert load.blocked["execute"] == pytest.approx(0.1, abs=0.05) and load.device == load.busy["execute"]
        assert load.full == pytest.approx({"allocate.out->execute.in": 0.6}, abs=0.1)
        assert load.num_waiting == sum(3 + engine for engine in range(num_engines))
