"""Waterfalls: a slower stage has a longer bar, and the bars fill the whole time."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.runtime.trace.tracer import in_order_of_time, request_names
from millrace.stages import SamplingParams, stage
from millrace.stages.insight.trace_view import TraceView
from millrace.stages.insight.waterfall import Waterfall, waterfall
from millrace.stages.testing.scripted.engine import Script, ScriptedEngine, scripted_engine
from tests.counts import count

NEVER_ENDS = Script(eos_probability=0.0)
MS = 1_000_000
NUM_REQUESTS = count(100, full=1_000)
STEP_S = (0.0005, 0.0005)  # each of the two phases of a step: 1 ms


def view_of(engine: ScriptedEngine) -> TraceView:
    return TraceView(engine.pipeline.tracer.read_all(), engine.pipeline.tracer.names())


def waterfalls(view: TraceView) -> dict[str, Waterfall]:
    made = {name: waterfall(view, number) for number, name in request_names(view.records).items()}
    assert all(made.values())
    return {name: fall for name, fall in made.items() if fall is not None}


def check_without_holes(fall: Waterfall) -> None:
    assert [bar.begin_ns for bar in fall.bars] == [fall.begin_ns, *(bar.end_ns for bar in fall.bars[:-1])]
    assert fall.bars[-1].end_ns == fall.end_ns and all(bar.ns > 0 for bar in fall.bars)


def services(fall: Waterfall) -> dict[str, float]:
    """Milliseconds by stage."""
    found: dict[str, float] = defaultdict(float)
    for bar in fall.bars:
        if bar.kind == "service":
            found[bar.stage] += bar.ns / MS
    return found


def slow_stage(name: str) -> Callable[[ScriptedEngine, SimEnv], None]:
    """Makes a stage sleep 50 ms before it takes up its next batch."""

    def make(engine: ScriptedEngine, env: SimEnv) -> None:
        slowed, is_armed = engine.pipeline.stages[name], [True]
        handle = slowed.handle

        async def late(batch: Any, out: Any) -> None:
            if is_armed and batch:
                is_armed.clear()
                await env.sleep(0.05)
            await handle(batch, out)

        slowed.handle = late  # type: ignore[method-assign]

    return make


def slow_device(phase: str) -> Callable[[ScriptedEngine, SimEnv], None]:
    """Makes one forward pass, or the sampling after it, take 50 ms more. A job's time is drawn when it begins."""

    def make(engine: ScriptedEngine, env: SimEnv) -> None:
        device = engine.pipeline.stages["execute"].device  # type: ignore[attr-defined]
        run_forward, run_sample, is_armed = device._run_forward, device._run_sample, [True]
        slow = tuple(seconds + 0.05 for seconds in STEP_S)

        def forward(*arguments: Any) -> Any:
            device._worker.delay_s = slow if is_armed and phase == "sample" else STEP_S
            is_armed.clear()
            return run_forward(*arguments)

        def sample(*arguments: Any) -> Any:
            device._worker.delay_s = STEP_S
            return run_sample(*arguments)

        device._run_forward, device._run_sample = forward, sample
        device._worker.delay_s = slow if phase == "forward" else STEP_S

    return make


SLOW = {
    **{name: slow_stage(name) for name in ("intake", "tokenize", "schedule", "allocate", "execute", "sample")},
    **{name: slow_stage(name) for name in ("detokenize", "exit", "mine")},
    "execute (its forward pass)": slow_device("forward"),
    "sample (on the device)": slow_device("sample"),
}


async def lone_request(env: SimEnv, slow: Callable[[ScriptedEngine, SimEnv], None] | None) -> Waterfall:
    engine = scripted_engine(script=NEVER_ENDS, env=env)
    engine.insert(stage(name="mine")(lambda item: item), after="sample")
    async with engine:
        if slow is not None:
            slow(engine, env)
        async for _ in engine.generate([3, 4, 5], SamplingParams(max_tokens=4)):
            pass
        (fall,) = waterfalls(view_of(engine)).values()
    check_without_holes(fall)
    return fall


@pytest.mark.parametrize("name", SLOW)
@sim_test(seeds=1, policies=("fifo",), thread_delay_s=STEP_S)
async def test_50_ms_more_in_one_stage_are_50_ms_more_of_its_bar_and_of_no_other(env: SimEnv, name: str):
    usual = await lone_request(env, None)
    slowed = await lone_request(env, SLOW[name])
    before, after, stage_name = services(usual), services(slowed), name.split()[0]
    assert 48 <= after[stage_name] - before[stage_name] <= 52
    assert all(after[other] <= before[other] + 0.01 for other in after if other != stage_name)
    assert usual.end_ns - usual.begin_ns == 8 * 0.5 * MS


@sim_test(seeds=2, thread_delay_s=STEP_S)
async def test_each_step_of_a_request_is_in_its_waterfall_with_its_tokens(env: SimEnv):
    async with scripted_engine(script=NEVER_ENDS, env=env, max_num_batched_tokens=16) as engine:
        async for _ in engine.generate([7] * 40, SamplingParams(max_tokens=3)):
            pass
        (fall,) = waterfalls(view_of(engine)).values()
    assert [(part.num_prompt_tokens, part.num_decodes) for part in fall.steps[:5]] == [
        *((16, 0), (16, 0), (8, 0)),
        *((0, 1), (0, 1)),
    ]
    assert fall.cause == "finish" and fall.num_preemptions == 0
    assert {bar.step for bar in fall.bars if bar.stage == "execute"} <= {part.step for part in fall.steps}


@sim_test(seeds=1, policies=("fifo",), thread_delay_s=STEP_S)
async def test_time_in_which_the_client_does_not_read_is_the_clients(env: SimEnv):
    async with scripted_engine(script=NEVER_ENDS, env=env, max_unread_tokens=8) as engine:
        reader = engine.generate([3, 4, 5], SamplingParams(max_tokens=30))
        await anext(reader)
        await asyncio.sleep(2.0)
        async for _ in reader:
            pass
        (fall,) = waterfalls(view_of(engine)).values()
    check_without_holes(fall)
    assert 1_950 * MS < fall.total_ns("client") < 2_000 * MS


@pytest.mark.slow
@sim_test(seeds=1, thread_delay_s=(0.0005, 0.002))
async def test_the_bars_of_many_requests_fill_the_time_that_their_clients_measured(env: SimEnv):
    """1,000 with MILLRACE_FULL=1. Some are preempted, wait for slots, have several choices, or are cancelled."""
    measured: dict[str, float] = {}
    parts, cursor = [], 0  # of the trace, as the ring holds less than all of it

    def collect(engine: ScriptedEngine) -> None:
        nonlocal cursor
        (reader,) = engine.pipeline.tracer.readers()
        records, cursor, num_lost = reader.read_since(cursor)
        parts.append(records)
        assert not num_lost

    async def ask(engine: ScriptedEngine, number: int) -> None:
        await env.sleep(env.random("arrivals").uniform(0, NUM_REQUESTS / 700))
        began_s, name = env.now(), f"request-{number}"
        params = SamplingParams(max_tokens=1 + number % 43, seed=number, n=2 if number % 50 == 0 else 1)
        reader = engine.generate([3 + number % 7] * (1 + number % 60), params, request_id=name)
        async for _ in reader:
            if number % 40 == 7:
                break  # its client goes away
        await reader.aclose()
        measured[name] = env.now() - began_s
        collect(engine)

    sizes = {"num_gpu_blocks": 20, "max_num_seqs": 8, "num_cpu_blocks": 30, "block_size": 8, "max_model_len": 128}
    async with scripted_engine(
        script=NEVER_ENDS, env=env, max_admitted_requests=2000, max_waiting_requests=2000, **sizes
    ) as engine:
        await asyncio.gather(*(ask(engine, number) for number in range(NUM_REQUESTS)))
        collect(engine)
        view = TraceView(in_order_of_time(parts), engine.pipeline.tracer.names())
        falls, num_preemptions = waterfalls(view), engine.scheduler.num_preemptions
    assert len(falls) == len(measured) == NUM_REQUESTS
    for name, fall in falls.items():
        check_without_holes(fall)
        assert abs(sum(bar.ns for bar in fall.bars) / 1e9 - measured[name]) < 0.001
    assert sum(fall.num_preemptions for fall in falls.values()) == num_preemptions > NUM_REQUESTS // 50
