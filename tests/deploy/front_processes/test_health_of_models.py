"""The health of a server with several models, while fronts start, hang or are away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from millrace.deploy.config import ServerConfig
from millrace.deploy.front_processes import all_models
from millrace.deploy.front_processes.words import FrontState
from millrace.runtime.startup.load_progress import LoadProgress
from millrace.stages.testing.scripted.engine import SMALL, ScriptedEngine
from millrace.stages.testing.scripted.script import Script
from tests.deploy.front_processes.local_fronts import LocalFronts, local_fronts
from tests.deploy.sockets import on_loop
from tests.stages.machines.scripted_engines import until

CONFIG = ServerConfig(port=0, allow_no_key=True)
PATH = "/health/ready"
READY = {"status": "ready", "reason": None}
ENDED = "its process has ended (signal 9); another one starts"


class Client:
    """Asks any front of a server."""

    def __init__(self, fronts: LocalFronts, http: aiohttp.ClientSession) -> None:
        self.fronts, self.servers, self._http = fronts, fronts.servers, http

    async def ask(self, front: int, path: str = PATH) -> tuple[int, dict[str, Any]]:
        async with self._http.get(self.fronts.urls[front] + path) as answer:
            return answer.status, await answer.json()

    async def at_all(self, path: str = PATH) -> tuple[int, dict[str, Any]]:
        """The answer of every front, which is the same but for the number of who says it."""
        found = [await self.ask(front, path) for front in range(len(self.servers))]
        alike = [(status, body | {"front": None}) for status, body in found]
        assert all(one == alike[0] for one in alike), alike
        return alike[0]

    async def tell(self, reason: str, *numbers: int) -> None:
        """The supervisor says why these fronts take no requests."""
        states = [
            replace(one, state="loading", reason=reason) if one.number in numbers else one for one in self.fronts.states
        ]
        self.fronts.tell(states)
        await self.until_told(states)

    async def until_told(self, states: Sequence[FrontState]) -> None:
        fronts: list[Any] = [server.service.fronts for server in self.servers]
        reasons = [one.reason for one in states]
        await until(lambda: all([one.reason for one in front.member.states] == reasons for front in fronts))


@asynccontextmanager
async def served(*models: str) -> AsyncIterator[Client]:
    """A front with an engine for each of these names."""
    async with AsyncExitStack() as stack, aiohttp.ClientSession() as http:
        engines = [await stack.enter_async_context(ScriptedEngine(SMALL, Script())) for _ in models]
        fronts = await stack.enter_async_context(local_fronts(engines, CONFIG, models=models))
        client = Client(fronts, http)
        await client.until_told(fronts.states)
        yield client


def before_each_ask(client: Client, front: int, act: Callable[[int], Awaitable[None]]) -> None:
    """Calls and awaits `act` with the number of each front that this one asks, before it asks."""
    fronts: Any = client.servers[front].service.fronts
    asked = fronts._asked

    @asynccontextmanager
    async def act_first(request: Any, number: int, *options: Any) -> AsyncIterator[Any]:
        await act(number)
        async with asked(request, number, *options) as found:
            yield found

    fronts._asked = act_first


@on_loop
async def test_a_standstill_longer_than_the_limit_leaves_a_healthy_model_healthy() -> None:
    asked: list[int] = []

    async def stand_still(number: int) -> None:
        asked.append(number)
        time.sleep(all_models.HEALTH_S + 0.5)  # of the loop, as when the machine stands still

    async with served("small", "large") as client:
        before_each_ask(client, 0, stand_still)
        status, body = await client.ask(0)
        assert (status, body["status"], body["missing_models"]) == (200, "ready", [])
        assert asked == [1], "a front does not ask itself"


@on_loop
async def test_the_fronts_of_a_model_are_asked_at_once_and_the_first_that_serves_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hang_at_1(number: int) -> None:
        if number == 1:
            await asyncio.Event().wait()

    async with served("small", "large", "large") as client:
        before_each_ask(client, 0, hang_at_1)
        monkeypatch.setattr(all_models, "HEALTH_S", 100_000.0)
        status, body = await client.ask(0)
        assert (status, body["models"]) == (200, {"small": READY, "large": READY})


@on_loop
async def test_one_front_answers_for_itself_if_a_model_or_a_front_is_named() -> None:
    async with served("small", "large") as client:
        client.servers[1].service.engine, engine = None, client.servers[1].service.engine
        status, body = await client.at_all()
        assert (status, body["status"], body["missing_models"]) == (200, "degraded", ["large"])
        for name, number, status in (("small", 0, 200), ("large", 1, 503)):
            for path in (f"{PATH}?model={name}", f"{PATH}?front={number}"):
                found = await client.at_all(path)
                assert found[0] == status and "models" not in found[1], path
                assert (await client.ask(1 - number, path))[1]["front"] == number
        client.servers[1].service.engine = engine


@on_loop
async def test_while_no_front_of_a_model_has_started_its_own_word_and_progress_are_told() -> None:
    async with served("small", "large") as client:
        engines = [server.service.engine for server in client.servers]
        await client.tell("it starts", 0, 1)
        for server in client.servers:
            server.service.engine, server.service.load_progress = None, LoadProgress(time.monotonic)
        found = [await client.ask(front) for front in (0, 1)]
        for status, body in found:
            assert (status, body["status"], body["progress"]["num_bytes"]) == (503, "loading", 0)
            for name in ("small", "large"):
                assert body["models"][name]["reason"].startswith("the model is loading: "), body
        for server, engine in zip(client.servers, engines, strict=True):
            server.service.engine = engine


@on_loop
async def test_a_front_that_has_ended_is_told_as_the_supervisor_has_it_and_once() -> None:
    async with served("small", "large", "large") as client:
        await client.servers[2].stop()
        await client.tell(ENDED, 2)
        status, body = await client.ask(0)
        assert (status, body["status"], body["missing_models"]) == (200, "degraded", [])
        assert body["models"] == {"small": READY, "large": READY}
        assert body["reason"] == f"front 2 is loading: {ENDED}"
    async with served("small", "large") as client:
        await client.servers[1].stop()
        await client.tell(ENDED, 1)
        status, body = await client.ask(0)
        assert (status, body["missing_models"]) == (200, ["large"])
        assert body["models"]["large"] == {"status": "loading", "reason": ENDED}
