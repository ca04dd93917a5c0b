"""Engines that say nothing for a while, as when a network loses all: their requests go on in engines that are heard."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.stages.fleet.fleet_processes import FleetProcesses
from millrace.stages.machines.engine_sources import FixedAddress
from millrace.stages.split.engine_core import SILENT_CHECKS
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


class Deaf:
    """These ends of links hear nothing until `heard`. Nothing is lost."""

    def __init__(self, *links: Any) -> None:
        self._sockets = [(link._transport.sock, link._on_readable) for link in links]
        for sock, _ in self._sockets:
            asyncio.get_running_loop().remove_reader(sock)

    def heard(self) -> None:
        for sock, read in self._sockets:
            if sock.fileno() >= 0:
                asyncio.get_running_loop().add_reader(sock, read)


def link_to(engine: Any, place: int) -> Any:
    """The front's end of the link to an engine."""
    return engine.core.processes.cores[place].client._link


async def hold_checks(engine: Any) -> None:
    """No engine is checked but by `check`, and none has an answer to give: a slow machine may have begun checks."""
    cores = engine.core.processes.cores
    for core in cores:
        core._next_check_s = math.inf
    await until(lambda: not any(core._num_silent_checks for core in cores))


async def check(engine: Any, times: int, heard: Sequence[int] = ()) -> None:
    """Checks the engines so often, as it is done each second; waits for the answers of those that are heard."""
    cores = engine.core.processes.cores
    for _ in range(times):
        for core in cores:
            core._next_check_s = 0.0
        engine.core.check_processes(0.0)
        for core in cores:
            core._next_check_s = math.inf  # none in between
        await until(lambda: all(not cores[place]._num_silent_checks for place in heard))


def num_requests(engine: Any) -> list[int]:
    return [one["num_requests"] for one in engine.engines]


@with_machines
async def test_requests_of_a_silent_engine_go_on_in_one_that_is_heard(machines: ScriptedMachines) -> None:
    await machines.start("a", "b")
    async with machines.front(*(FixedAddress(name, (name, 1)) for name in "ab")) as engine:
        await hold_checks(engine)
        streams = [asyncio.ensure_future(answer(engine, prompt, LONG)) for prompt in PROMPTS]
        await until(lambda: all(server.num_live for server in machines.servers.values()))
        silent = link_to(engine, 0)
        deaf = Deaf(silent)
        await check(engine, SILENT_CHECKS, heard=[1])
        assert states(engine) == {"a": "ready", "b": "ready"}
        await check(engine, 1, heard=[1])
        assert not silent.is_open  # requests leave it a few turns later, and it is dialled again soon after that
        deaf.heard()  # what was on the way: nothing of it is read any more
        assert await asyncio.gather(*streams) == [expected(prompt, LONG) for prompt in PROMPTS]
        await until(lambda: states(engine)["a"] == "ready")
        assert engine.core.processes.cores[0].has_come_back
        await until(lambda: not machines.servers["a:1"].num_live)


@with_machines
async def test_requests_leave_an_engine_that_hears_nothing_though_its_reports_come(machines: ScriptedMachines) -> None:
    await machines.start("a", "b")
    async with machines.front(*(FixedAddress(name, (name, 1)) for name in "ab")) as engine:
        await hold_checks(engine)
        (front,) = machines.servers["a:1"].fronts.values()
        deaf = Deaf(front._link)
        streams = [asyncio.ensure_future(answer(engine, prompt, LONG)) for prompt in PROMPTS]
        await until(lambda: sum(num_requests(engine)) == len(PROMPTS))
        assert num_requests(engine)[0]
        machines.servers["a:1"]._report_to_routers()
        front.report(machines.servers["a:1"].report())
        await check(engine, SILENT_CHECKS + 1, heard=[1])
        assert await asyncio.gather(*streams) == [expected(prompt, LONG) for prompt in PROMPTS]
        deaf.heard()
        await until(lambda: states(engine) == {"a": "ready", "b": "ready"})


@with_machines
async def test_no_link_is_closed_while_all_engines_are_silent(machines: ScriptedMachines) -> None:
    await machines.start("a", "b")
    async with machines.front(*(FixedAddress(name, (name, 1)) for name in "ab")) as engine:
        await hold_checks(engine)
        streams = [asyncio.ensure_future(answer(engine, prompt, LONG)) for prompt in PROMPTS]
        await until(lambda: all(server.num_live for server in machines.servers.values()))
        deaf = Deaf(link_to(engine, 0), link_to(engine, 1))
        await check(engine, 3 * SILENT_CHECKS)
        assert states(engine) == {"a": "ready", "b": "ready"}
        deaf.heard()
        assert await asyncio.gather(*streams) == [expected(prompt, LONG) for prompt in PROMPTS]
        assert engine.num_deaths == 0


@pytest.mark.parametrize(
    ("changes", "may_leave"),
    [
        ({}, True),
        ({"outlive_links": False}, False),  # the end of the link would end the process
        ({"is_idle": True}, False),  # nothing waits for it
        ({"is_trying": True}, False),  # a suspect would end as the cause of two deaths
        ({"is_heard": False}, False),
        ({"model_digest": "other"}, False),  # answers go on with the model that began them
    ],
)
def test_a_link_is_closed_only_where_that_helps_and_blames_no_suspect(changes: dict[str, Any], may_leave: bool) -> None:
    facts = {"outlive_links": True, "is_idle": False, "is_trying": False, "is_heard": True, "model_digest": "own"}
    facts |= changes
    silent = SimpleNamespace(index=0, is_heard=True, model_digest="own")
    other = SimpleNamespace(index=1, is_heard=facts["is_heard"], model_digest=facts["model_digest"])
    table = SimpleNamespace(is_idle=lambda core: facts["is_idle"], is_trying=lambda core: facts["is_trying"])
    fleet: Any = SimpleNamespace(
        hosts=SimpleNamespace(outlive_links=facts["outlive_links"]),
        table=table,
        _set=SimpleNamespace(serving=lambda: [silent, other]),
    )
    assert FleetProcesses.may_leave(fleet, silent) is may_leave  # type: ignore[arg-type]
