"""A front that cannot reach an engine says why, and what to change: at its start, and while it runs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from millrace.runtime.pipeline import NotServing
from millrace.runtime.processes.auth import AuthError, FleetKey, KeyRefused
from millrace.runtime.processes.tcp import TcpListener
from millrace.runtime.processes.transport import SocketTransport
from millrace.stages.errors import ConfigError
from millrace.stages.fleet.request_hold import RequestHold
from millrace.stages.machines import engine_peers
from millrace.stages.machines.connected_hosts import look_at_first
from millrace.stages.machines.engine_peers import SURE_REFUSALS, TcpPeer, look_at, reason_of
from millrace.stages.machines.engine_sources import Address, FixedAddress, SourceError
from millrace.stages.machines.membership import Members
from millrace.stages.machines.route_engine import RouteEngine
from tests.stages.machines.scripted_engines import Named, ScriptedMachines, answer, states, until, with_machines

KEY, OTHER = FleetKey(bytes(range(32))), FleetKey(bytes(range(1, 33)))


def told(members: Members) -> str:
    """To operators."""
    return "" if members.why_waiting is None else members.why_waiting.details or ""


def hold_of(engine: RouteEngine) -> RequestHold:
    """That of a front."""
    return engine.core.processes._hold  # type: ignore[attr-defined, no-any-return]


@asynccontextmanager
async def listening(machines: ScriptedMachines, key: FleetKey | None) -> AsyncIterator[tuple[str, int]]:
    """The address of an engine with this key."""
    await machines.start("a")
    listener = TcpListener("127.0.0.1", 0, key, machines.servers["a:1"].take)
    await listener.start()
    try:
        yield listener.address
    finally:
        await listener.aclose()


@pytest.mark.parametrize(
    ("theirs", "own", "said"),
    [
        (
            KEY,
            OTHER,
            "it closed the connection at the proof of the key, so it has another one; give both the same --fl",
        ),
        (KEY, None, r"perhaps it wants a key; give both ends the same file of a key, or none \(--fleet-key-file, "),
        (None, KEY, "it has no key and this end has one"),
    ],
)
def test_a_wrong_key_or_one_alone_ends_the_start_with_what_to_change(
    theirs: FleetKey | None, own: FleetKey | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_peers, "FIRST_PAUSE_S", 0.01)

    @with_machines
    async def test(machines: ScriptedMachines) -> None:
        async with listening(machines, theirs) as address:
            with pytest.raises(ConfigError, match=f"^engine 127.0.0.1:{address[1]}: .*{said}"):
                await look_at(TcpPeer(address, own))

    test()


def test_an_engine_that_ends_at_the_proof_of_the_key_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ending:
        name, num_asked = "a:1", 0

        async def connect(self) -> SocketTransport:
            self.num_asked += 1
            raise KeyRefused("it closed the connection") if self.num_asked % SURE_REFUSALS else OSError("it is away")

        def note_stuck(self) -> None:
            raise AssertionError

    async def main() -> None:
        peer, told = Ending(), list[str]()
        looking = asyncio.ensure_future(look_at(peer, on_failure=told.append))
        await until(lambda: peer.num_asked > 3 * SURE_REFUSALS)
        assert not looking.done() and any("it is away" in one for one in told)
        looking.cancel()
        await asyncio.wait([looking])

    monkeypatch.setattr(engine_peers, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(engine_peers, "LONGEST_PAUSE_S", 0.001)
    asyncio.run(main())


def test_a_front_that_waits_for_its_first_engine_says_which_and_why() -> None:
    async def main() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and nothing listens
            host, port = taken.getsockname()
            members = Members([FixedAddress("a", (host, port))], lambda address: TcpPeer(address, KEY))
            await members.open()
            assert members.why_waiting is None
            looking = asyncio.ensure_future(look_at_first(members))
            await until(lambda: members.why_waiting is not None)
            assert f"engine {host}:{port}: Connection refused: nothing listens there" in told(members)
            looking.cancel()
            await asyncio.wait([looking])

    asyncio.run(main())


def test_a_front_says_that_no_engine_is_named_only_once_it_has_looked() -> None:
    class Source(Named):
        error: str | None = None

        async def look(self) -> Sequence[Address]:
            if self.error is not None:
                raise SourceError(self.error)
            return await super().look()

    async def main() -> None:
        first, second = Source(), Source()
        members = Members([first, second], lambda address: TcpPeer(address, KEY))
        assert members.why_waiting is None, "it has not looked yet: perhaps its engines load"
        await members.open()
        assert told(members) == "no engine is named yet"
        second.error = "no such file"
        await members.look_again()
        assert told(members) == "no engine is named yet; no such file"
        second.error = None
        await members.look_again()
        assert told(members) == "no engine is named yet"

    asyncio.run(main())


@with_machines
async def test_a_front_that_has_reached_an_engine_does_not_say_that_it_waits_for_one(
    machines: ScriptedMachines,
) -> None:
    members = Members([FixedAddress(name, (name, 1)) for name in "ab"], machines.peer)
    await members.open()
    looking = asyncio.ensure_future(look_at_first(members))
    await until(lambda: told(members).count("nothing listens there") == 2)
    await machines.start("a")
    assert len(await looking) == 1
    assert members.why_waiting is None, "it reads its tokenizer now"


@with_machines
async def test_what_a_front_knows_of_engines_that_came_and_went_does_not_grow(machines: ScriptedMachines) -> None:
    await machines.start("a", "b", "c")
    named = Named("a")
    async with machines.front(named) as engine:
        hosts = engine.core.processes.hosts  # type: ignore[attr-defined]
        for name in "bcabca":
            named.names = name
            await until(lambda name=name: states(engine) == {name: "ready"})
        assert len(hosts._reached) <= 2, "one in each place that was used"


@with_machines
async def test_the_health_of_a_front_names_each_engine_that_it_cannot_reach(machines: ScriptedMachines) -> None:
    await machines.start("a", "b")
    async with machines.front(*(FixedAddress(name, (name, 1)) for name in "ab")) as engine:
        await until(lambda: states(engine) == {"a": "ready", "b": "ready"})
        await machines.stop("a")
        await machines.stop("b")
        await until(lambda: str(engine.health.details).count("nothing listens there") == 2)
        assert "engine a:1 is not reached: " in str(engine.health.details)
        assert "engine b:1 is not reached: " in str(engine.health.details)
        assert engine.health.reason == "the engines are not reached", "clients need no addresses"
        with pytest.raises(NotServing, match="^the engine is loading: the engines are not reached$"):
            hold_of(engine).end()
            await answer(engine, "hello")
        assert all("nothing listens there" in one["reason"] for one in engine.engines)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (socket.gaierror(-2, "Name or service not known"), "look at its spelling"),
        (TimeoutError(), "no answer in time; look at the address"),
        (ConnectionRefusedError(111, "Connection refused"), "nothing listens there; the engine still loads, has ended"),
        (AuthError("another key"), "another key; give both the same --fleet-key-file"),
        (OSError(113, "No route to host"), "No route to host"),
    ],
)
def test_the_reason_of_an_error_says_what_to_look_at(error: Exception, said: str) -> None:
    assert said in reason_of(error)
