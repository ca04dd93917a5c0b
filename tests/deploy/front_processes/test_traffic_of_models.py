"""Splits and health of a server with several models, each with a front of its own: the same at each front."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from millrace.deploy.config import ServerConfig
from millrace.stages.engine.engine import Engine
from millrace.stages.machines.engine_sources import FixedAddress
from millrace.stages.traffic.traffic_rules import TrafficRules
from tests.deploy.front_processes.local_fronts import LocalFronts, local_fronts
from tests.stages.machines.scripted_engines import ScriptedMachines, states, until, with_machines

CONFIG = ServerConfig(port=0, allow_no_key=True, admin_key=("admin",))
MODELS = ["small", "org/large"]
PATH = "/admin/traffic"


class Client:
    """Asks either front."""

    def __init__(self, fronts: LocalFronts, engines: list[Engine], http: aiohttp.ClientSession) -> None:
        self.fronts, self.engines, self._http = fronts, engines, http

    async def ask(self, front: int, path: str = PATH, body: Any = None) -> tuple[int, Any]:
        method = "GET" if body is None else "POST"
        async with self._http.request(method, self.fronts.urls[front] + path, json=body) as answer:
            return answer.status, await answer.json()

    async def refused(self, front: int, body: Any) -> str:
        """Why a change is refused. No model follows other rules then."""
        before = self.splits
        status, answer = await self.ask(front, PATH, body)
        assert status == 400 and self.splits == before
        return str(answer["error"]["message"])

    @property
    def splits(self) -> list[tuple[str | None, str | None]]:
        """Split and shadow of each model."""
        texts = [[None if one is None else str(one) for one in engine.traffic.rules.shares] for engine in self.engines]  # type: ignore[union-attr]
        return [(split, shadow) for split, shadow in texts]


@asynccontextmanager
async def served(machines: ScriptedMachines, *versions: str) -> AsyncIterator[Client]:
    """Two models, and an engine of the first at a; of the second one at b, and one at c. `versions`: in this order."""
    for name, version in zip("abc", versions, strict=True):
        await machines.start(name, labels={"version": version})
    a, b, c = (FixedAddress(name, (name, 1)) for name in "abc")
    async with (
        machines.front(a) as small,
        machines.front(b, c) as large,
        local_fronts([small, large], CONFIG, models=MODELS) as fronts,
        aiohttp.ClientSession(headers={"Authorization": "Bearer admin"}) as http,
    ):
        for engine in (small, large):
            await until(lambda engine=engine: set(states(engine).values()) == {"ready"})  # type: ignore[misc]
        client = Client(fronts, [small, large], http)
        await until(lambda: all(len(server.service.fronts.states) == 2 for server in fronts.servers))  # type: ignore[union-attr]
        yield client


@with_machines
async def test_a_split_is_of_the_model_that_the_call_names_at_either_front(machines: ScriptedMachines) -> None:
    async with served(machines, "v1", "v1", "v2") as client:
        for front, percent in ((0, 5), (1, 50)):
            split = f"version=v2:{percent}"
            status, answer = await client.ask(front, PATH, {"split": split, "model": "org/large"})
            assert status == 200 and {name: one["split"] for name, one in answer["models"].items()} == {
                "small": None,
                "org/large": split,
            }
            assert answer["models"]["org/large"]["engines"] == {"rest": 1, "labelled": 1, "shadow": 0}
            await until(lambda split=split: client.splits == [(None, None), (split, None)])  # type: ignore[misc]
        both = [(await client.ask(front))[1] for front in (0, 1)]
        assert both[0] == both[1] and list(both[0]["models"]) == MODELS
        assert (await client.ask(0, f"{PATH}?model=org/large"))[1] == both[0]["models"]["org/large"]
        status, answer = await client.ask(0, PATH, {"split": None, "model": "other"})
        assert status == 404 and "the models are small, org/large" in answer["error"]["message"]


@with_machines
async def test_a_call_that_names_no_model_changes_all_or_none(machines: ScriptedMachines) -> None:
    async with served(machines, "v2", "v1", "v2") as client:
        for front, percent in ((0, 5), (1, 50)):
            split = f"version=v2:{percent}"
            status, answer = await client.ask(front, PATH, {"split": split, "dry_run": True})
            assert status == 200 and {one["split"] for one in answer["models"].values()} == {split}
            assert client.splits[0][0] != split, "a dry run changes nothing"
            status, answer = await client.ask(front, PATH, {"split": split})
            assert status == 200 and {one["split"] for one in answer["models"].values()} == {split}
            await until(lambda split=split: client.splits == [(split, None)] * 2)  # type: ignore[misc]
        text = await client.refused(0, {"split": None, "shadow": "version=v2:1"})
        assert text.startswith("model small: all engines that serve have version=v2:1"), text
        assert "dry_run" in await client.refused(0, {"dry_run": 1}) and "model" in await client.refused(0, {"model": 1})
        assert "unknown field" in await client.refused(0, {"part": ""})


@with_machines
async def test_a_model_must_be_named_where_the_call_would_not_mean_the_same(machines: ScriptedMachines) -> None:
    async with served(machines, "v1", "v1", "v2") as client:
        for front in (0, 1):
            text = await client.refused(front, {"split": "version=v2:5"})
            assert "only engines of org/large have this label" in text, text
        assert (await client.ask(0, PATH, {"split": "version=v3:5"}))[0] == 200, "no engine has it yet"
        await until(lambda: client.splits == [("version=v3:5", None)] * 2)
        assert (await client.ask(1, PATH, {"split": None, "model": "small"}))[0] == 200
        await until(lambda: client.splits == [(None, None), ("version=v3:5", None)])
        for front in (0, 1):
            text = await client.refused(front, {"split": "version=v3:50"})
            assert "org/large has split version=v3:5" in text, text


@with_machines
async def test_models_that_change_during_a_call_for_all_are_not_made_alike_by_it(machines: ScriptedMachines) -> None:
    async with served(machines, "v2", "v1", "v2") as client:
        fronts: Any = client.fronts.servers[0].service.fronts
        answer_of, other = fronts.answer_of, "version=v3:5"

        async def change_first(request: Any, front: int, **options: Any) -> tuple[int, Any]:
            if "body" in options:  # that of a change, of which the call has seen what was before
                client.engines[1].traffic.change(TrafficRules.parse(None, other))  # type: ignore[union-attr]
            return await answer_of(request, front, **options)

        fronts.answer_of = change_first
        status, answer = await client.ask(0, PATH, {"split": "version=v2:5"})
        assert status == 400 and f"org/large has split version=v2:5, shadow {other}" in answer["error"]["message"]
        assert client.splits == [(None, None), (None, other)]


@with_machines
async def test_a_server_is_ready_while_one_of_its_models_is_served_at_each_front(machines: ScriptedMachines) -> None:
    async def health() -> tuple[int, dict[str, Any]]:
        found = [await client.ask(front, "/health/ready") for front in (0, 1)]
        (status, body), (other, same) = [(status, {**body, "front": None}) for status, body in found]
        assert (status, body) == (other, same)
        return status, body

    async with served(machines, "v1", "v1", "v2") as client:
        status, body = await health()
        assert status == 200 and body["status"] == "ready" and body["missing_models"] == []
        await machines.stop("c")
        await until(lambda: states(client.engines[1])["c"] != "ready")
        status, body = await health()
        assert (status, body["status"], body["missing_models"]) == (200, "degraded", [])
        assert body["models"]["org/large"]["status"] == "degraded"
        await machines.stop("b")
        await until(lambda: not client.engines[1].health.is_ready)
        status, body = await health()
        assert (status, body["status"], body["missing_models"]) == (200, "degraded", ["org/large"])
        assert body["models"]["small"] == {"status": "ready", "reason": None}
        assert "model org/large is loading" in body["reason"]
        await machines.stop("a")
        await until(lambda: not client.engines[0].health.is_ready)
        status, body = await health()
        assert status == 503 and body["status"] == "loading" and "model small is loading" in body["reason"]
