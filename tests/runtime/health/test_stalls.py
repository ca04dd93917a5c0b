"""Stall detection names what does not move, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from millrace.runtime.health.stalls import Stall, find_stall
from millrace.runtime.pipeline import Pipeline
from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.stages import SamplingParams
from millrace.stages.sample.step_pace import StepPace
from millrace.stages.testing.scripted.engine import Script, ScriptedEngine, scripted_engine

TIMEOUT_S = 10.0
NEVER_ENDS = Script(eos_probability=0.0)
STAGES = ("intake", "tokenize", "schedule", "allocate", "execute", "sample", "detokenize", "exit")
EDGES = (
    *("intake.in", "intake.out->tokenize.in", "tokenize.out->schedule.in", "schedule.out->allocate.in"),
    *("allocate.report->schedule.report", "allocate.out->execute.in", "execute.out->sample.in"),
    *(
        "execute.rates->allocate.rates",
        "sample.feedback->schedule.feedback",
        "sample.out->detokenize.in",
        "detokenize.out->exit.in",
    ),
)


async def read(engine: ScriptedEngine, num_prompt: int, max_tokens: int = 400) -> None:
    async for _ in engine.generate([97] * num_prompt, SamplingParams(max_tokens=max_tokens)):
        pass


async def frozen(env: SimEnv, freeze: Callable[[Pipeline], None]) -> tuple[Stall | None, float]:
    """The stall found after a part of a loaded engine is frozen, and how long after the freeze."""
    async with scripted_engine(script=NEVER_ENDS, env=env) as engine:
        readers = [asyncio.ensure_future(read(engine, 3 + i)) for i in range(3)]
        await env.sleep(0.5)
        assert find_stall(engine.pipeline, TIMEOUT_S) is None
        freeze(engine.pipeline)
        began = env.now()
        readers += [asyncio.ensure_future(read(engine, 10 + i)) for i in range(3)]
        stall = None
        while stall is None and env.now() < began + 3 * TIMEOUT_S:
            await env.sleep(0.25)
            stall = find_stall(engine.pipeline, TIMEOUT_S)
        for reader in readers:
            reader.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*readers)
        return stall, env.now() - began


def freeze_stage(name: str) -> Callable[[Pipeline], None]:
    async def never(batch: Any, out: Any) -> None:
        await asyncio.Event().wait()

    def freeze(pipeline: Pipeline) -> None:
        pipeline.stages[name].handle = never  # type: ignore[method-assign]

    return freeze


def freeze_edge(name: str) -> Callable[[Pipeline], None]:
    """Makes the channel accept items up to its capacity and deliver none."""

    def freeze(pipeline: Pipeline) -> None:
        pipeline.channels[name].recv_all = lambda now=None: []  # type: ignore[method-assign]
        if name.startswith("execute.rates"):  # all that goes there has passed with the first step
            pipeline.channels[name].try_send(object())

    return freeze


@pytest.mark.parametrize("name", STAGES)
def test_a_frozen_stage_is_named_within_twice_the_threshold(name: str):
    @sim_test(seeds=1, policies=("fifo",), thread_delay_s=(0.2, 0.3))
    async def run(env: SimEnv) -> None:
        stall, seconds = await frozen(env, freeze_stage(name))
        assert stall is not None and (stall.name, stall.is_edge) == (name, False), stall
        assert stall.waited_s >= TIMEOUT_S and seconds < 2 * TIMEOUT_S
        assert name in stall.reason

    run()


@pytest.mark.parametrize("name", EDGES)
def test_a_frozen_edge_is_named_within_twice_the_threshold(name: str):
    @sim_test(seeds=1, policies=("fifo",), thread_delay_s=(0.2, 0.3))
    async def run(env: SimEnv) -> None:
        stall, seconds = await frozen(env, freeze_edge(name))
        assert stall is not None and (stall.name, stall.is_edge) == (name, True), stall
        assert seconds < 2 * TIMEOUT_S

    run()


@sim_test(seeds=1, policies=("fifo",))
async def test_the_edges_frozen_here_are_all_there_are(env: SimEnv):
    async with scripted_engine(env=env) as engine:
        assert set(EDGES) == set(engine.pipeline.channels) and set(STAGES) == set(engine.pipeline.runners)


@sim_test(seeds=1, policies=("fifo",), thread_delay_s=(5.0, 9.9))
async def test_an_hour_busy_with_steps_of_seconds_is_no_stall(env: SimEnv):
    async with scripted_engine(script=NEVER_ENDS, env=env, max_num_seqs=2) as engine:
        readers = [asyncio.ensure_future(read(engine, 3 + i, max_tokens=500)) for i in range(4)]
        while env.now() < 3600:
            await env.sleep(0.5)
            assert find_stall(engine.pipeline, 2 * TIMEOUT_S) is None
        assert not all(reader.done() for reader in readers)
        for reader in readers:
            reader.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*readers)


@sim_test(seeds=1, policies=("fifo",))
async def test_an_hour_idle_is_no_stall(env: SimEnv):
    async with scripted_engine(script=NEVER_ENDS, env=env) as engine:
        await read(engine, 5, max_tokens=20)
        while env.now() < 3600:
            await env.sleep(7)
            assert find_stall(engine.pipeline, TIMEOUT_S) is None


@sim_test(seeds=1, policies=("fifo",))
async def test_a_request_that_came_just_now_after_a_long_rest_is_no_stall(env: SimEnv):
    async with scripted_engine(script=NEVER_ENDS, env=env) as engine:
        await read(engine, 5, max_tokens=20)
        await env.sleep(5 * TIMEOUT_S)
        intake = engine.pipeline.channels["intake.in"]
        reader = asyncio.ensure_future(read(engine, 5, max_tokens=20))
        num_looks = 0
        for _ in range(50):
            num_looks += len(intake) > 0  # it is queued, and intake has not been woken yet
            assert find_stall(engine.pipeline, TIMEOUT_S) is None
            await asyncio.sleep(0)
        assert num_looks > 0
        await reader


@sim_test(seeds=1, policies=("fifo",))
async def test_unread_answers_are_no_stall(env: SimEnv):
    async with scripted_engine(script=NEVER_ENDS, env=env, max_unread_tokens=4, max_parked_s=1000.0) as engine:
        answers = engine.generate([97], SamplingParams(max_tokens=400))
        await anext(answers)
        for _ in range(400):
            await env.sleep(1)
            assert find_stall(engine.pipeline, TIMEOUT_S) is None
        assert engine.scheduler.num_parked == 1
        await answers.aclose()  # type: ignore[attr-defined]


@sim_test(seeds=1, policies=("fifo",), thread_delay_s=(0.2, 0.3))
async def test_what_moves_again_is_no_stall_any_more(env: SimEnv):
    async with scripted_engine(script=NEVER_ENDS, env=env) as engine:
        go_on = asyncio.Event()
        handle = engine.pipeline.stages["detokenize"].handle

        async def wait(batch: Any, out: Any) -> None:
            await go_on.wait()
            await handle(batch, out)

        engine.pipeline.stages["detokenize"].handle = wait  # type: ignore[method-assign]
        reader = asyncio.ensure_future(read(engine, 3, max_tokens=20))
        await env.sleep(15)
        stall = find_stall(engine.pipeline, TIMEOUT_S)
        assert stall is not None and stall.name == "detokenize"
        go_on.set()
        await reader
        assert find_stall(engine.pipeline, TIMEOUT_S) is None


def test_a_step_is_expected_to_take_what_the_slowest_of_its_size_took():
    pace = StepPace()
    assert pace.expect_s(1) == 0.0
    pace.note(1, 0.5)
    pace.note(16, 2.0)
    assert (pace.expect_s(1), pace.expect_s(16), pace.expect_s(31)) == (0.5, 2.0, 2.0)
    assert pace.expect_s(2048) == 2.0 * 2**7  # never seen: as if each token took as long
    for _ in range(50):
        pace.note(16, 0.1)
    assert 0.1 <= pace.expect_s(16) < 0.6


@sim_test(seeds=1, policies=("fifo",), thread_delay_s=(5.0, 9.9))
async def test_a_step_that_takes_as_long_as_its_like_is_no_stall_however_short_the_timeout(env: SimEnv):
    async with scripted_engine(script=NEVER_ENDS, env=env) as engine:
        await read(engine, 3, max_tokens=20)
        reader = asyncio.ensure_future(read(engine, 3, max_tokens=50))
        for _ in range(400):
            await env.sleep(0.5)
            assert find_stall(engine.pipeline, timeout_s=3.0) is None
        await reader


def test_a_forward_pass_that_hangs_is_blamed_on_execute_though_sample_waits_for_it():
    async def main() -> Stall | None:
        go_on = threading.Event()
        async with scripted_engine(script=NEVER_ENDS) as engine:
            forward = engine.model.forward

            def hang(grant: Any) -> Any:
                go_on.wait(60)
                return forward(grant)

            engine.model.forward = hang  # type: ignore[method-assign]
            reader = asyncio.ensure_future(read(engine, 3, max_tokens=3))
            async with asyncio.timeout(30):  # a process that was suspended starts counting again
                while (stall := find_stall(engine.pipeline, timeout_s=0.2)) is None:  # noqa: ASYNC110 - found by polling
                    await asyncio.sleep(0.1)
            go_on.set()
            await reader
            assert find_stall(engine.pipeline, timeout_s=0.2) is None
            return stall

    stall = asyncio.run(main())
    assert stall is not None and (stall.name, stall.is_edge) == ("execute", False)


@sim_test(seeds=1, policies=("fifo",))
async def test_what_waited_while_the_whole_process_was_suspended_is_no_stall(env: SimEnv):
    async with scripted_engine(script=NEVER_ENDS, env=env) as engine:
        reader = asyncio.ensure_future(read(engine, 3))
        await env.sleep(0.5)
        freeze_stage("execute")(engine.pipeline)
        await env.sleep(2 * TIMEOUT_S)
        assert find_stall(engine.pipeline, TIMEOUT_S) is not None
        assert engine.pipeline.watch is not None
        engine.pipeline.watch.resumed_s = env.now()  # as a tick does that comes much too late
        assert find_stall(engine.pipeline, TIMEOUT_S) is None
        await env.sleep(1.01 * TIMEOUT_S)
        assert find_stall(engine.pipeline, TIMEOUT_S) is not None  # its receiver had a chance to take it
        reader.cancel()
        with suppress(asyncio.CancelledError):
            await reader
