"""A reset of the prefix caches of a fleet, in virtual time: no process keeps an older prefix."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.runtime.env.log import captured_logs
from millrace.runtime.simulation.run import SimEnv, run
from millrace.stages.config import EngineConfig
from millrace.stages.params import SamplingParams
from millrace.stages.testing.scripted.script import Script
from tests.simulation.fleet import FleetChild, SimFleet
from tests.simulation.memory_link import in_memory

STOPPED_S = 5.0
PROMPT = list(range(3, 40))


def world_of(env: SimEnv) -> Any:
    """A simulated fleet's surroundings, in which nothing is drawn or checked."""
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    checks = dict.fromkeys(("note_tokens", "check_owners", "note_step"), nothing)
    setup, drawn = SimpleNamespace(is_async=False), SimpleNamespace(group_from=8)
    state = {"children": [], "num_loads": 0, "num_starts_to_fail": 0, "guilty": set(), "kills": Counter()}
    return SimpleNamespace(env=env, setup=setup, drawn=drawn, script=Script(eos_probability=0.0), **state, **checks)


def simulate(test: Callable[[SimEnv, SimFleet], Awaitable[None]]) -> None:
    async def live(env: SimEnv) -> None:
        world = world_of(env)
        kind = type("WorldChild", (FleetChild,), {"world": world})
        config = EngineConfig(data_parallel_size=2, block_size=8, num_gpu_blocks=64, max_model_len=256)
        with in_memory(env, cast(Any, None), kind):
            async with SimFleet(config, world, env) as engine:
                await asyncio.gather(*(ask(engine) for _ in range(4)))
                assert [len(cached(engine, index)) > 0 for index in range(2)] == [True, True]
                await test(env, engine)
            await env.aclose()

    with captured_logs():
        run(live, seed=0)


async def ask(engine: SimFleet) -> None:
    async for _ in engine.generate(PROMPT, SamplingParams(max_tokens=3)):
        pass


def child_of(engine: SimFleet, index: int) -> Any:
    client = engine.core.processes.cores[index].client
    assert client is not None
    return client._child


def cached(engine: SimFleet, index: int) -> Any:
    """The prefix cache of a process."""
    return child_of(engine, index).process._loop.core.allocate.allocator.cache


@pytest.mark.parametrize("hears_s", [0.0, STOPPED_S])
def test_a_reset_reaches_a_process_that_is_stopped_before_any_later_request(hears_s: float) -> None:
    async def test(env: SimEnv, engine: SimFleet) -> None:
        child_of(engine, 1).theirs.hold(hears_s)
        num_forgotten = await engine.forget_prefixes()
        asking = asyncio.gather(*(ask(engine) for _ in range(2)))
        queries = cached(engine, 1).num_hits
        assert num_forgotten > 0 and bool(len(cached(engine, 1))) == (hears_s > 0.0)
        await env.sleep(2 * STOPPED_S)
        await asking
        assert cached(engine, 1).num_hits == queries, "the request after the reset found nothing of before"

    simulate(test)


def test_a_process_that_starts_during_a_reset_has_nothing_to_forget() -> None:
    async def test(env: SimEnv, engine: SimFleet) -> None:
        gone = child_of(engine, 1)
        gone.kill()
        await env.sleep(0.001)
        assert await engine.forget_prefixes() > 0, "the other one answers"
        await env.sleep(STOPPED_S)
        assert engine.core.processes.cores[1].is_serving and child_of(engine, 1) is not gone
        assert [len(cached(engine, index)) for index in range(2)] == [0, 0]

    simulate(test)
