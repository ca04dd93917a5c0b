"""An engine that accepts a front and ends its link soon, again and again, is dialled after longer and longer pauses."""

from __future__ import annotations

import asyncio
from socket import socketpair
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from millrace.deploy.cli.machines import route
from millrace.deploy.cli.machines.route import RoutedEngine
from millrace.runtime.env.log import captured_logs
from millrace.runtime.processes.transport import SocketTransport
from millrace.runtime.simulation.run import SimEnv, run
from millrace.stages.config import EngineConfig
from millrace.stages.fleet.core_keeper import NUM_AT_ONCE
from millrace.stages.machines.connected_hosts import ConnectedHosts
from millrace.stages.machines.engine_peers import reason_of
from millrace.stages.machines.engine_sources import FixedAddress
from millrace.stages.machines.membership import Members
from millrace.stages.split.process_client import EngineDied
from millrace.stages.split.protocol import Gone
from tests.stages.machines.scripted_engines import ScriptedMachines, answer, expected, states, until, with_machines

A, B = FixedAddress("a", ("a", 1)), FixedAddress("b", ("b", 1))


@pytest.mark.parametrize("is_planned", [False, True])
def test_an_engine_that_ends_its_link_at_once_is_dialled_less_and_less_often(is_planned: bool) -> None:
    @with_machines
    async def test(machines: ScriptedMachines) -> None:
        await machines.start("a", "b")
        server, num_ends = machines.servers["b:1"], 0
        welcome = server.welcome

        def welcome_and_end(front: Any, setup: Any) -> None:
            nonlocal num_ends
            welcome(front, setup)
            num_ends += 1
            if is_planned:
                front.post(Gone())
                front.flush()
            else:
                front.flush()
                front.close()
                server.lost(front, "a test")

        with captured_logs() as lines:
            async with machines.front(A, B) as engine:
                await until(lambda: states(engine) == {"a": "ready", "b": "ready"})
                server.welcome = welcome_and_end  # type: ignore[method-assign]
                (front,) = server.fronts.values()
                front.close()
                server.lost(front, "a test")
                await until(lambda: any(line["event"] == "engine_process.backed_off" for line in lines))
                assert num_ends == NUM_AT_ONCE, "and the end of the first link"
                (shown,) = [one for one in engine.engines if one["address"] == "b:1"]
                assert shown["state"] == "loading" and "end soon after their start" in shown["reason"]
                assert await answer(engine, "meanwhile") == expected("meanwhile")
                await until(lambda: num_ends == NUM_AT_ONCE + 2)
        assert sum(line["event"] == "engine_process.backed_off" for line in lines) == 1, "once, not at each try"

    test()


def test_a_front_that_cannot_start_with_an_engine_tries_again_after_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    starts_s: list[float] = []

    async def live(env: SimEnv) -> None:
        class Dying:
            def __init__(self, *args: Any, **options: Any) -> None:
                """Takes all."""

            async def __aenter__(self) -> None:
                starts_s.append(env.now())
                raise EngineDied("its link ended")

        async def looked(*args: Any) -> list[Any]:
            return [SimpleNamespace(served_names=())]

        async def opened() -> None:
            """Finds nothing."""

        monkeypatch.setattr(route, "RouteEngine", Dying)
        monkeypatch.setattr(route, "look_at_first", looked)
        monkeypatch.setattr(route, "front_config", lambda *args: EngineConfig())
        members = cast(Any, SimpleNamespace(open=opened, peers=[]))
        starting = asyncio.ensure_future(RoutedEngine(EngineConfig(), members, None, None).__aenter__())
        await env.sleep(60.0)
        starting.cancel()
        await asyncio.wait([starting])

    with captured_logs() as lines:
        run(live, seed=0)
    gaps = [round(after - before, 2) for before, after in zip(starts_s, starts_s[1:], strict=False)]
    assert gaps[:7] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0] and set(gaps[7:]) == {5.0}
    assert [line["event"] for line in lines].count("engine.lost_at_start") == 1


def test_an_engine_that_was_reached_before_is_dialled_each_second_while_it_is_away() -> None:
    class Peer:
        name, is_there = "a:1", False
        asked_s: ClassVar[list[float]] = []

        async def connect(self) -> SocketTransport:
            self.asked_s.append(asyncio.get_running_loop().time())
            if not self.is_there:
                raise ConnectionRefusedError
            theirs, ours = socketpair()
            theirs.close()
            return SocketTransport(ours)

        def note_stuck(self) -> None:
            """Does nothing."""

    async def dialled_for(env: SimEnv, hosts: ConnectedHosts, seconds: float) -> list[float]:
        """The pauses between two dials."""
        Peer.asked_s.clear()
        looking = asyncio.ensure_future(hosts.look(0, reasons.append))
        await env.sleep(seconds)
        looking.cancel()
        await asyncio.wait([looking])
        return [round(after - before, 2) for before, after in zip(Peer.asked_s, Peer.asked_s[1:], strict=False)]

    async def live(env: SimEnv) -> None:
        peer = Peer()
        hosts = ConnectedHosts(cast(Any, None), Members.of([peer]), None)
        assert max(await dialled_for(env, hosts, 60.0)) == 5.0, "it may be any address"
        peer.is_there = True
        (await hosts._connect(0)).kill()
        peer.is_there = False
        assert (await dialled_for(env, hosts, 60.0))[:6] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
        assert set(reasons) == {f"engine a:1 is not reached: {reason_of(ConnectionRefusedError())}"}

    reasons: list[str] = []
    run(live, seed=0)
