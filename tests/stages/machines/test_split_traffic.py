"""A split of requests between engines with and without a label, on scripted engines."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import aiohttp

from millrace.deploy.config import ServerConfig
from millrace.deploy.server.server import Server
from millrace.stages.engine.engine import Engine
from millrace.stages.fleet.traffic.fleet_traffic import FleetTraffic
from millrace.stages.machines.engine_sources import FixedAddress
from millrace.stages.messages import Prompt, Request
from millrace.stages.traffic.split_counts import Side
from millrace.stages.traffic.traffic_rules import TrafficRules, TrafficShare
from tests.stages.machines.scripted_engines import (
    LONG,
    SHORT,
    ScriptedMachines,
    answer,
    expected,
    states,
    until,
    with_machines,
)

A, B = FixedAddress("a", ("a", 1)), FixedAddress("b", ("b", 1))
ADMIN = {"Authorization": "Bearer admin"}


def share(percent: float) -> TrafficRules:
    return TrafficRules(TrafficShare("version", "v2", percent))


async def start_both(machines: ScriptedMachines) -> None:
    """Engine a of v1, and b of v2."""
    await machines.start("a", labels={"version": "v1"})
    await machines.start("b", labels={"version": "v2"})


async def both_ready(engine: Engine) -> None:
    await until(lambda: states(engine) == {"a": "ready", "b": "ready"})


def counted(engine: Engine, field: str) -> dict[Side, int]:
    assert engine.traffic is not None
    return {side: getattr(counts, field) for side, counts in engine.traffic.counts.sides.items()}


def places(engine: Engine) -> list[int]:
    """The engine of each request so far, in order."""
    return [choice["engine"] for choice in reversed(engine.choices)]


@with_machines
async def test_a_split_moves_all_requests_step_by_step_without_a_restart(machines: ScriptedMachines) -> None:
    await start_both(machines)
    async with machines.front(A, B, traffic=share(0)) as engine:
        assert engine.traffic is not None
        await both_ready(engine)
        prompts = [f"prompt {number}" for number in range(8)]
        for percent in (0, 50, 100):
            engine.traffic.change(share(percent))
            assert await asyncio.gather(*(answer(engine, prompt) for prompt in prompts)) == list(map(expected, prompts))
        found = places(engine)
        assert found[:8] == [0] * 8 and found[16:] == [1] * 8 and 0 < sum(found[8:16]) < 8
        assert counted(engine, "num_requests") == {"labelled": sum(found), "rest": 24 - sum(found)}
        assert counted(engine, "num_finished") == counted(engine, "num_requests")
        assert counted(engine, "num_moved") == counted(engine, "num_failed") == {"labelled": 0, "rest": 0}
        assert all(counts.first_token_us.num_observed for counts in engine.traffic.counts.sides.values())


@with_machines
async def test_a_session_stays_on_its_side_whole(machines: ScriptedMachines) -> None:
    await start_both(machines)
    async with machines.front(A, B, traffic=share(50)) as engine, machines.front(B, A, traffic=share(50)) as other:
        await both_ready(engine)
        await both_ready(other)
        where: dict[str, set[str]] = {}
        for number in range(12):
            front, session = (engine, other)[number % 2], f"s{number % 6}"
            prompt = Prompt(text=f"turn {number}")
            outbox = await front.submit(Request(f"r{number}", (prompt,), SHORT, session=session, owner="o"))
            async for _ in outbox:
                pass
            index = front.choices[0]["engine"]
            where.setdefault(session, set()).add(front.engines[index]["address"])
        assert all(len(found) == 1 for found in where.values()), where
        assert {address for found in where.values() for address in found} == {"a:1", "b:1"}


@with_machines
async def test_no_request_fails_for_a_side_that_is_empty_or_drains(machines: ScriptedMachines) -> None:
    await machines.start("a", labels={"version": "v1"})
    async with machines.front(A, B, traffic=share(100)) as engine:
        assert await answer(engine, "no v2 yet") == expected("no v2 yet")
        assert counted(engine, "num_moved") == {"labelled": 1, "rest": 0}
        await machines.start("b", labels={"version": "v2"})
        await both_ready(engine)
        stream = asyncio.ensure_future(answer(engine, "long", LONG))
        await until(lambda: places(engine)[-1:] == [1])
        second = machines.servers["b:1"]
        draining = asyncio.ensure_future(second.drain(60.0))
        await until(lambda: states(engine)["b"] == "draining")
        prompts = [f"while it drains {number}" for number in range(5)]
        assert await asyncio.gather(*(answer(engine, prompt) for prompt in prompts)) == list(map(expected, prompts))
        assert await stream == expected("long", LONG) and await draining
        assert places(engine) == [0, 1, *[0] * 5]
        assert counted(engine, "num_moved") == {"labelled": 6, "rest": 0}
        assert counted(engine, "num_failed") == {"labelled": 0, "rest": 0}


@with_machines
async def test_the_admin_route_changes_the_split_and_shows_both_sides(machines: ScriptedMachines) -> None:
    await start_both(machines)
    config = ServerConfig(port=0, admin_key=("admin",), allow_no_key=True)
    async with (
        Server(config) as server,
        machines.front(A, B) as engine,
        aiohttp.ClientSession(f"{server.url}/", headers=ADMIN) as http,
    ):
        server.attach(engine)
        await both_ready(engine)
        async with http.get("/admin/traffic") as response:
            engines = {"rest": 2, "labelled": 0, "shadow": 0}
            found = {"split": None, "shadow": None, "engines": engines, "sides": {}, "copies": {}}
            assert await response.json() == found
        async with http.post("/admin/traffic", json={"split": "version=v2:100", "dry_run": True}) as response:
            planned = await response.json()
            assert planned == found | {"split": "version=v2:100", "engines": {"rest": 1, "labelled": 1, "shadow": 0}}
        assert engine.traffic is not None and engine.traffic.rules == TrafficRules()
        async with http.post("/admin/traffic", json={"split": "version=v2:100", "model": "another"}) as response:
            assert response.status == 404 and (await response.json())["error"]["code"] == "model_not_found"
        async with http.post("/admin/traffic", json={"split": "version=v2:100"}) as response:
            assert response.status == 200 and (await response.json())["split"] == "version=v2:100"
        assert await answer(engine, "now") == expected("now")
        async with http.get("/admin/traffic") as response:
            sides = (await response.json())["sides"]
            assert sides["labelled"]["num_requests"] == 1 and sides["labelled"]["ttft_p50_ms"] > 0
            assert sides["rest"]["num_requests"] == 0
        for body, text in (({"split": "v2"}, "NAME=VALUE:PERCENT"), ({"split": 5}, "split"), ({"part": ""}, "part")):
            async with http.post("/admin/traffic", json=body) as response:
                assert response.status == 400 and text in (await response.json())["error"]["message"], body
        lines = server.metrics.render().decode().splitlines()
        assert 'millrace:split_percent{split="version=v2"} 100.0' in lines
        assert 'millrace:split_requests_total{side="labelled",split="version=v2"} 1.0' in lines
        async with http.post("/admin/traffic", json={"split": None}) as response:
            assert (await response.json())["split"] is None
        assert "millrace:split_percent" not in server.metrics.render().decode()


def test_a_split_of_another_label_is_counted_anew_and_one_of_another_size_is_not() -> None:
    traffic = FleetTraffic(share(5))
    traffic.counts.note_sent("r", "rest", "rest")
    traffic.change(share(50))
    assert traffic.counts.sides["rest"].num_requests == 1
    traffic.change(TrafficRules(replace(share(50).split, value="v3")))  # type: ignore[type-var]
    assert traffic.counts.sides["rest"].num_requests == 0
