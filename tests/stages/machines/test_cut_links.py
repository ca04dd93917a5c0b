"""Connections between fronts and engines that end while both live."""

from __future__ import annotations

import asyncio

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
