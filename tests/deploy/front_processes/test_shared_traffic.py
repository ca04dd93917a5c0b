"""A split that is set at one front holds at all fronts of its server, and at those that start later."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from millrace.deploy.cli.machines import route
from millrace.deploy.cli.machines.route import RoutedEngine
from millrace.deploy.config import ServerConfig
from millrace.deploy.front_processes.front_member import FrontMember
from millrace.deploy.front_processes.kept_metrics import KeptMetrics
from millrace.deploy.front_processes.supervisor import ServerPlan, Supervisor
from millrace.deploy.front_processes.words import CODEC, TrafficSettings, settings_of, traffic_of
from millrace.stages.config import EngineConfig
from millrace.stages.machines.engine_sources import FixedAddress
from millrace.stages.machines.membership import Members
from millrace.stages.machines.route_engine import RouteEngine
from millrace.stages.traffic.traffic_rules import TrafficRules
from tests.deploy.front_processes.local_fronts import SupervisorEnd, local_fronts
from tests.stages.machines.scripted_engines import ScriptedMachines, until, with_machines

RULES = TrafficRules.parse("version=v2:50", "version=v3:1")
A = FixedAddress("a", ("a", 1))


def test_what_one_front_sets_is_told_to_all_and_given_to_successors() -> None:
    plan = ServerPlan(
        front_module="",
        core_module="",
        engine_config=EngineConfig(),
        server_config=ServerConfig(front_processes=2, allow_no_key=True),
        sources={},
        engines=["a:1"],
        traffic=TrafficRules.parse("version=v2:5", None),
    )
    supervisor, told = Supervisor(plan), list[Any]()
    slots = [SimpleNamespace(post=told.append, was_ready=True, pid=1, state="", reason="", num_restarts=0)] * 2
    supervisor.fronts, supervisor._folder = cast(Any, slots), Path()
    assert traffic_of(supervisor._front_setup(1, ["a:1"])[0].traffic) == plan.traffic
    header, body = CODEC.encode(settings_of(RULES))
    supervisor._from_front(0, CODEC.decode(header, b"".join(body)))
    assert [traffic_of(word) for word in told if isinstance(word, TrafficSettings)] == [RULES, RULES]
    assert traffic_of(supervisor._front_setup(1, ["a:1"])[0].traffic) == RULES


def test_what_is_set_for_one_of_several_models_is_told_to_its_fronts_alone() -> None:
    plan = ServerPlan(
        front_module="",
        core_module="",
        engine_config=EngineConfig(),
        server_config=ServerConfig(front_processes=4, allow_no_key=True),
        sources={},
        engines=["a:1", "b:1"],
        models={"small": ["a:1"], "large": ["b:1"]},
        traffic=TrafficRules.parse("version=v2:5", None),
    )
    supervisor, told = Supervisor(plan), list[tuple[int, TrafficSettings]]()

    def slot(number: int) -> Any:
        post = lambda word: told.append((number, word)) if isinstance(word, TrafficSettings) else None  # noqa: E731
        return SimpleNamespace(post=post, was_ready=True, pid=1, state="", reason="", num_restarts=0)

    supervisor.fronts, supervisor._folder = [slot(number) for number in range(4)], Path()
    header, body = CODEC.encode(settings_of(RULES, "large"))
    supervisor._from_front(0, CODEC.decode(header, b"".join(body)))
    assert [(number, traffic_of(word)) for number, word in told] == [(1, RULES), (3, RULES)]
    starting = [traffic_of(supervisor._front_setup(number, ["a:1"])[0].traffic) for number in range(4)]
    assert starting == [plan.traffic, RULES] * 2
    supervisor._from_front(1, settings_of(TrafficRules()))
    assert [number for number, _ in told[2:]] == [0, 1, 2, 3]


@with_machines
async def test_the_admin_route_tells_the_supervisor_what_was_set(machines: ScriptedMachines) -> None:
    await machines.start("a", labels={"version": "v2"})
    config = ServerConfig(port=0, allow_no_key=True, admin_key=("admin",))
    async with machines.front(A) as one, machines.front(A) as two, local_fronts([one, two], config) as fronts:
        told: list[TrafficRules] = []
        member = cast(Any, fronts.servers[1].service.fronts).member
        member.link.post = lambda word: told.append(traffic_of(word)) if isinstance(word, TrafficSettings) else None
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer admin"}) as http:
            url = fronts.urls[1] + "/admin/traffic"
            async with http.post(url, json={"split": "version=v2:50", "shadow": "version=v3:1"}) as response:
                assert response.status == 200
        assert told == [RULES] and two.traffic is not None and two.traffic.rules == RULES
        member.follow_traffic(two.traffic.change)
        member._receive(settings_of(TrafficRules()))
        assert two.traffic.rules == TrafficRules() != RULES


def test_a_front_follows_what_the_supervisor_tells() -> None:
    router, changed = RoutedEngine(EngineConfig(), cast(Any, None), None, None), list[TrafficRules]()
    router.follow(RULES)
    assert router._traffic == RULES, "before its engine has started"
    router._engine = cast(Any, SimpleNamespace(traffic=SimpleNamespace(change=changed.append)))
    router.follow(TrafficRules())
    assert changed == [TrafficRules()]


@with_machines
async def test_what_is_told_while_a_front_starts_is_not_lost(machines: ScriptedMachines) -> None:
    ours, theirs = socket.socketpair()
    member, end = FrontMember(theirs, ends_process=False), SupervisorEnd(0, ours, KeptMetrics(dict))
    member.link.setup.set_result(None)
    member.link.start()
    end.post(settings_of(RULES))
    await until(lambda: member._traffic is not None)
    await machines.start("a", labels={"version": "v2"})
    router = RoutedEngine(EngineConfig(), Members((A,), machines.peer), None, None)
    member.follow_traffic(router.follow)
    assert router._traffic == RULES, "told with the setup, before the front could follow"

    def told_late(*args: Any, **options: Any) -> RouteEngine:
        engine = RouteEngine(*args, read_text=machines.read_text, **options)
        member._receive(settings_of(TrafficRules.parse("version=v2:7", None)))
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(route, "RouteEngine", told_late)
        async with router as engine:
            assert engine.traffic is not None and str(engine.traffic.rules.split) == "version=v2:7"
    member.close()
    end.close()
