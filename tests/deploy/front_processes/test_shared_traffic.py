"""A split that is set at one front holds at all fronts of its server, and at those that start later."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp

from millrace.deploy.cli.machines.route import RoutedEngine
from millrace.deploy.config import ServerConfig
from millrace.deploy.front_processes.supervisor import ServerPlan, Supervisor
from millrace.deploy.front_processes.words import CODEC, TrafficSettings, settings_of, traffic_of
from millrace.stages.config import EngineConfig
from millrace.stages.machines.engine_sources import FixedAddress
from millrace.stages.traffic.traffic_rules import TrafficRules
from tests.deploy.front_processes.local_fronts import local_fronts
from tests.stages.machines.scripted_engines import ScriptedMachines, with_machines

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
        member.on_traffic = two.traffic.change
        member._receive(settings_of(TrafficRules()))
        assert two.traffic.rules == TrafficRules() != RULES


def test_a_front_follows_what_the_supervisor_tells() -> None:
    router, changed = RoutedEngine(EngineConfig(), cast(Any, None), None, None), list[TrafficRules]()
    router.follow(RULES)
    assert router._traffic == RULES, "before its engine has started"
    router._engine = cast(Any, SimpleNamespace(traffic=SimpleNamespace(change=changed.append)))
    router.follow(TrafficRules())
    assert changed == [TrafficRules()]
