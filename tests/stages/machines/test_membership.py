"""Engines that come and go while a front runs, and what names them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from millrace.deploy.cli.machines.addresses import parse_address, parse_source
from millrace.runtime.processes.auth import AuthError
from millrace.runtime.simulation.run import SimEnv, run
from millrace.runtime.simulation.transport import SimConnection
from millrace.stages.errors import ConfigError
from millrace.stages.machines.connected_hosts import look_at_first
from millrace.stages.machines.engine_peers import look_at
from millrace.stages.machines.engine_sources import AddressFile, DnsName, FixedAddress, SourceError, certified_name
from millrace.stages.machines.membership import Members
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

PROMPTS = ["Zoe and 1", "Tom", "The sea is", "One", "I"]


@with_machines
async def test_a_front_starts_with_the_engine_that_is_there_and_the_others_join(machines: ScriptedMachines) -> None:
    await machines.start("b")
    async with machines.front(*(FixedAddress(name, (name, 1)) for name in "abc")) as engine:
        assert states(engine) == {"a": "loading", "b": "ready", "c": "loading"}
        assert await answer(engine, "Tom") == expected("Tom")
        await machines.start("a", "c")
        await until(lambda: set(states(engine).values()) == {"ready"})
        asked = await asyncio.gather(*(answer(engine, prompt, LONG) for prompt in PROMPTS))
        assert asked == [expected(prompt, LONG) for prompt in PROMPTS]
        assert all(server.table._next for server in machines.servers.values())  # each had requests


@with_machines
async def test_a_removed_engine_ends_its_requests_and_then_its_link_is_closed(machines: ScriptedMachines) -> None:
    await machines.start("a", "b")
    named = Named("a", "b")
    async with machines.front(named) as engine:
        first, second = machines.servers.values()
        streams = [asyncio.ensure_future(answer(engine, prompt, LONG)) for prompt in PROMPTS]
        await until(lambda: first.num_live + second.num_live == len(PROMPTS))
        ours, (link,) = first.num_live, first.fronts.values()
        named.names = ["b"]
        await until(lambda: states(engine)["a"] == "draining")
        num_seen = link.num_seen
        assert await answer(engine, "later") == expected("later")
        assert link.num_seen == num_seen and ours and first.num_fronts == 1
        assert await asyncio.gather(*streams) == [expected(prompt, LONG) for prompt in PROMPTS]
        await until(lambda: first.num_fronts == 0)
        await until(lambda: states(engine) == {"b": "ready"})
        assert sum(one["num_deaths"] for one in engine.engines) == 0


@with_machines
async def test_places_of_engines_that_left_are_used_by_those_that_come(machines: ScriptedMachines) -> None:
    await machines.start("a", "b", "c")
    named = Named("a")
    async with machines.front(named) as engine:
        for names in (["a", "b"], ["b"], ["b", "c"], ["c"], ["c", "a"]):
            named.names = names
            await until(lambda names=names: states(engine) == dict.fromkeys(names, "ready"))  # type: ignore[misc]
            asked = await asyncio.gather(*(answer(engine, prompt) for prompt in PROMPTS))
            assert asked == [expected(prompt) for prompt in PROMPTS]
        assert {one["index"] for one in engine.engines} <= {0, 1}
        named.names = []
        await until(lambda: not engine.engines)
        assert engine.health.state == "loading" and "no engine is named" in (engine.health.reason or "")


@with_machines
async def test_an_engine_that_is_not_like_the_first_is_told_of_and_gets_nothing(machines: ScriptedMachines) -> None:
    await machines.start("a")
    await machines.start("b", max_num_seqs=4)
    named = Named("a")
    async with machines.front(named) as engine:
        named.names = ["a", "b"]
        await until(lambda: any("max_num_seqs = 4" in (one["reason"] or "") for one in engine.engines))
        assert states(engine) == {"a": "ready", "b": "loading"}
        assert await answer(engine, "Tom") == expected("Tom")


def test_a_file_names_engines_and_keeps_the_last_ones_when_it_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "engines"
    source = AddressFile("file:engines", path, lambda text: parse_address("address", text))

    def replaced(text: str) -> Any:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(path)
        return asyncio.run(source.look())

    with pytest.raises(SourceError, match="No such file"):
        asyncio.run(source.look())
    assert replaced("# two\n10.0.0.5:7000\n\n [fd00::5]:7001 \n") == [("10.0.0.5", 7000), ("fd00::5", 7001)]
    with pytest.raises(SourceError, match=r"line 2: .*must be HOST:PORT"):
        replaced("10.0.0.5:7000\n10.0.0.6\n")
    with pytest.raises(SourceError, match="longer than"):
        replaced("#" * (1 << 17))
    assert replaced("") == []


def test_all_addresses_of_a_name_are_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"engines": ["10.0.0.2", "10.0.0.1", "10.0.0.1", "fd00::5"]}

    def resolve(name: str, port: int, *args: Any, **kwargs: Any) -> Any:
        if name not in told:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (address, port)) for address in told[name]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    source = parse_source("dns:engines:7000")
    assert isinstance(source, DnsName)
    assert asyncio.run(source.look()) == [("10.0.0.1", 7000), ("10.0.0.2", 7000), ("fd00::5", 7000)]
    other = FixedAddress("10.0.0.9:7000", ("10.0.0.9", 7000))
    assert certified_name([other, source], ("10.0.0.1", 7000)) == "engines"
    assert certified_name([other, source], ("10.0.0.9", 7000)) == "10.0.0.9"
    del told["engines"]
    with pytest.raises(SourceError, match="not known"):
        asyncio.run(source.look())


@pytest.mark.parametrize(
    ("names", "message"),
    [("aba", "engine a:1 is named twice"), ([f"e{number}" for number in range(65)], "65 engines: .*at most 64")],
)
def test_engines_named_twice_or_too_many_are_refused(names: Any, message: str) -> None:
    sources = [FixedAddress(name, (name, 1)) for name in names]
    with pytest.raises(ConfigError, match=message):
        asyncio.run(Members(sources, lambda address: None).open())  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("text", ["10.0.0.5", "dns:engines", "dns:7000", "file:", "fd00::5:7000"])
def test_what_names_no_engine_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        parse_source(text)


def test_engines_that_refuse_a_front_are_asked_again_once_a_period() -> None:
    class Stranger:
        name = "a:1"

        async def connect(self) -> Any:
            asked_s.append(asyncio.get_running_loop().time())
            raise AuthError("another key")

        def note_stuck(self) -> None:
            raise AssertionError

    async def live(env: SimEnv) -> None:
        named = Named("a")
        named.period_s = 0.5
        members = Members([named], lambda address: Stranger())
        await members.open()
        await looked_at_for(env, 10.2, look_at_first(members))

    asked_s: list[float] = []
    run(live, seed=0)
    assert pauses(asked_s) == [0.5] * 20


@pytest.mark.parametrize("text", ["a..b:7000", "dns:a..b:7000", f"dns:{'a' * 64}.org:7000"])
def test_what_can_be_no_name_of_a_host_is_refused_before_it_is_looked_up(text: str) -> None:
    with pytest.raises(ConfigError, match="is no name of a host: label"):
        parse_source(text)


def test_an_engine_that_closes_each_connection_is_asked_with_longer_pauses() -> None:
    class Full:
        name = "a:1"

        def __init__(self, env: SimEnv) -> None:
            self._env = env

        async def connect(self) -> Any:
            asked_s.append(self._env.now())
            theirs, ours = SimConnection(self._env, delay_s=(0.0, 0.0)).ends
            theirs.close()
            return ours

        def note_stuck(self) -> None:
            raise AssertionError

    async def live(env: SimEnv) -> None:
        await looked_at_for(env, 20.0, look_at(Full(env)))

    asked_s: list[float] = []
    run(live, seed=0)
    assert pauses(asked_s) == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


async def looked_at_for(env: SimEnv, seconds: float, look: Coroutine[Any, Any, object]) -> None:
    looking = asyncio.ensure_future(look)
    await env.sleep(seconds)
    looking.cancel()
    await asyncio.wait([looking])


def pauses(asked_s: list[float]) -> list[float]:
    return [round(after - before, 2) for before, after in pairwise(asked_s)]
