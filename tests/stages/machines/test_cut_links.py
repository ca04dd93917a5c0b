"""Connections between fronts and engines that end while both live."""

from __future__ import annotations

import asyncio

import pytest

from millrace.runtime.pipeline import NotServing
from millrace.stages.config import EngineConfig
from millrace.stages.errors import Overloaded
from millrace.stages.machines.engine_server import EngineServer
from millrace.stages.machines.engine_sources import FixedAddress
from tests.stages.machines.scripted_engines import (
    LONG,
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
    await machines.start("a")
    async with machines.front(FixedAddress("a", ("a", 1))) as engine:
        await machines.stop("a")
        await until(lambda: not engine.health.is_ready)
        waiting = asyncio.ensure_future(answer(engine, "first"))
        await until(lambda: bool(engine.exit.live))
        engine.core.processes._hold._end()  # type: ignore[attr-defined]
        assert not engine.takes_requests
        with pytest.raises(NotServing):
            await answer(engine, "too late")
        await machines.start("a")
        assert await waiting == expected("first"), "it was taken, and goes on"
        assert engine.takes_requests


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
