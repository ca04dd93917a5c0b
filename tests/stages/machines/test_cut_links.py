"""Connections between fronts and engines that end while both live."""

from __future__ import annotations

import asyncio

import pytest

from millrace.runtime.pipeline import NotServing
from millrace.stages.config import EngineConfig
from millrace.stages.errors import Overloaded, Unavailable
from millrace.stages.fleet.request_hold import RequestHold
from millrace.stages.machines.engine_server import EngineServer
from millrace.stages.machines.engine_sources import FixedAddress
from millrace.stages.machines.route_engine import RouteEngine
from millrace.stages.messages import Prompt, Request
from tests.stages.machines.scripted_engines import (
    LONG,
    Named,
    ScriptedMachines,
    answer,
    expected,
    states,
    until,
    with_machines,
)

PROMPTS = [f"prompt {number}" for number in range(6)]


def cut(server: EngineServer) -> None:
    """Ends the connections of all fronts, as a network does."""
    for front in list(server.fronts.values()):
        front.close()
        server.lost(front, "a cut")


def hold(engine: RouteEngine) -> RequestHold:
    """That of a front."""
    return engine.core.processes._hold  # type: ignore[attr-defined, no-any-return]


@with_machines
async def test_no_request_ends_by_cuts_of_links_however_many(machines: ScriptedMachines) -> None:
    await machines.start("a", "b")
    async with machines.front(*(FixedAddress(name, (name, 1)) for name in "ab")) as engine:
        streams = [asyncio.ensure_future(answer(engine, prompt, LONG)) for prompt in PROMPTS]
        servers = list(machines.servers.values())
        await until(lambda: all(server.num_live for server in servers))
        for number in range(6):
            cut(servers[number % 2])
            await until(lambda: "ready" in states(engine).values())
        assert await asyncio.gather(*streams) == [expected(prompt, LONG) for prompt in PROMPTS]


@with_machines
async def test_a_request_that_was_tried_when_its_link_was_cut_waits_for_the_engine(machines: ScriptedMachines) -> None:
    await machines.start("a", "b")
    async with machines.front(*(FixedAddress(name, (name, 1)) for name in "ab")) as engine:
        stream = asyncio.ensure_future(answer(engine, "hello", LONG))
        first, second = machines.servers.values()
        await until(lambda: bool(first.num_live or second.num_live))
        cut(first if first.num_live else second)
        await until(lambda: bool(first.num_live or second.num_live))  # its trial, in one of them
        cut(first if first.num_live else second)
        assert await stream == expected("hello", LONG)


@with_machines
async def test_requests_that_come_while_no_engine_is_there_wait_for_one(machines: ScriptedMachines) -> None:
    await machines.start("a")
    async with machines.front(FixedAddress("a", ("a", 1))) as engine:
        await machines.stop("a")
        await until(lambda: not engine.health.is_ready)
        waiting = [asyncio.ensure_future(answer(engine, prompt)) for prompt in PROMPTS]
        await until(lambda: len(engine.exit.live) == len(PROMPTS))
        assert not engine.health.is_ready and engine.takes_requests
        await machines.start("a")
        assert await asyncio.gather(*waiting) == [expected(prompt) for prompt in PROMPTS]
        assert engine.health.is_ready


@with_machines
async def test_they_are_refused_once_no_engine_has_come_back_for_a_while(machines: ScriptedMachines) -> None:
    machines.step_s = 0.1
    await machines.start("a")
    async with machines.front(FixedAddress("a", ("a", 1))) as engine:
        begun = await engine.submit(Request("begun", (Prompt(text="begun"),), LONG))
        await until(lambda: begun.has_started)
        await machines.stop("a")
        await until(lambda: not engine.health.is_ready)
        waiting = asyncio.ensure_future(answer(engine, "first"))
        await until(lambda: len(engine.exit.live) == 2)
        hold(engine).end()  # as after its time
        assert not engine.takes_requests
        with pytest.raises(Unavailable) as refused:
            await waiting
        assert refused.value.code == "loading"
        assert list(engine.exit.live) == [begun.request_id], "what has begun goes on"
        machines.step_s = 0.001
        with pytest.raises(NotServing):
            await answer(engine, "too late")
        await machines.start("a")
        await until(lambda: engine.takes_requests)
        assert await answer(engine, "again") == expected("again")
        await until(lambda: not engine.exit.live)


@with_machines
async def test_a_thread_may_ask_whether_a_front_without_an_engine_takes_requests(machines: ScriptedMachines) -> None:
    await machines.start("a")
    async with machines.front(FixedAddress("a", ("a", 1))) as engine:
        assert await asyncio.to_thread(lambda: engine.takes_requests)
        await machines.stop("a")
        await until(lambda: not engine.health.is_ready)
        assert await asyncio.to_thread(lambda: engine.takes_requests)


@with_machines
async def test_no_request_is_taken_while_the_last_engine_drains_and_starts_again(machines: ScriptedMachines) -> None:
    await machines.start("a")
    async with machines.front(FixedAddress("a", ("a", 1))) as engine:
        draining = asyncio.ensure_future(machines.servers["a:1"].drain(60.0, "finish"))
        await until(lambda: not engine.health.is_ready)
        assert not engine.takes_requests
        assert await draining
        await machines.stop("a")
        await until(lambda: states(engine) == {"a": "loading"})
        assert not engine.takes_requests
        await machines.start("a")
        await until(lambda: engine.takes_requests)


@with_machines
async def test_no_request_is_taken_once_no_engine_is_named(machines: ScriptedMachines) -> None:
    await machines.start("a")
    named = Named("a")
    async with machines.front(named) as engine:
        await until(lambda: engine.takes_requests)
        named.names = ()
        await until(lambda: not engine.health.is_ready)
        assert not engine.takes_requests
        await until(lambda: not engine.engines)
        assert not engine.takes_requests


@with_machines
async def test_no_more_requests_wait_for_an_engine_than_a_queue_may_have(machines: ScriptedMachines) -> None:
    await machines.start("a")
    async with machines.front(FixedAddress("a", ("a", 1)), own=EngineConfig(max_waiting_requests=3)) as engine:
        await machines.stop("a")
        await until(lambda: not engine.health.is_ready)
        waiting = [asyncio.ensure_future(answer(engine, prompt)) for prompt in PROMPTS[:3]]
        await until(lambda: len(engine.exit.live) == 3)
        with pytest.raises(Overloaded, match="3 requests wait for their first token"):
            await answer(engine, "one more")
        await machines.start("a")
        assert await asyncio.gather(*waiting) == [expected(prompt) for prompt in PROMPTS[:3]]
