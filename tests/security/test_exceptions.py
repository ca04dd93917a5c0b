"""An exception of each class, in each stage and in each route. Its client hears of a request id, and of nothing
inside."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest

from millrace.deploy.config import ServerConfig
from millrace.deploy.server.server import Server
from millrace.runtime.env.log import captured_logs
from millrace.stages.testing.scripted.engine import ScriptedEngine
from tests.counts import count
from tests.deploy.running import Answer
from tests.security.oracle import CHAT, TEXT, check_error

SECRET = 'File "/home/someone/secret.py", line 3, in load: 0x7f00deadbeef token=abc'


class Panic(BaseException):
    """As a panic of Rust code surfaces."""


ERRORS = [RuntimeError, KeyError, MemoryError, RecursionError, OSError, UnicodeError, AssertionError, Panic]
STAGES = ["intake", "tokenize", "schedule", "allocate", "execute", "sample", "detokenize"]
ROUTES = [
    ("POST", CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    ("POST", TEXT, {"prompt": "hi", "max_tokens": 2}),
    ("POST", TEXT, {"prompt": "hi", "max_tokens": 2, "stream": True}),
    ("POST", "/tokenize", {"prompt": "hi"}),
    ("POST", "/detokenize", {"tokens": [97]}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/scripted", None),
    ("GET", "/metrics", None),
    ("DELETE", "/v1/requests/x", None),
]


async def ask(session: aiohttp.ClientSession, url: str, method: str, path: str, body: Any) -> Answer:
    began = time.perf_counter()
    async with session.request(method, url + path, json=body, headers={"X-Request-Id": "req-1"}) as response:
        data = await response.read()
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Answer(response.status, headers, data, time.perf_counter() - began)


def break_once(stage: Any, error: type[BaseException]) -> list[str]:
    """The stage's next batch that is not empty raises. What it said is in the list then."""
    handle = stage.handle
    said: list[str] = []

    async def broken(batch: Any, out: Any) -> None:
        if not batch:
            return await handle(batch, out)
        stage.handle = handle
        said.append(SECRET)
        raise error(SECRET)

    stage.handle = broken
    return said


CASES = [(bool(place % 2), error) for place, error in enumerate(ERRORS)]  # streamed or whole
CASES += [(False, Panic)]  # the only one that is no Exception: both
CASES += [(not stream, error) for stream, error in CASES if (not stream, error) not in CASES]


@pytest.mark.parametrize(("stream", "error"), CASES[: count(len(ERRORS) + 1, full=len(CASES))])
def test_a_stage_that_breaks_tells_its_client_nothing(audit, error, stream):
    """One after the other breaks, on an engine that has seen no other break if it did not get over that."""
    body = {"prompt": "hi", "max_tokens": 3, "ignore_eos": True, "stream": stream}

    async def run(names: list[str]) -> None:
        """The first stages of these, up to one after which the engine is not ready."""
        async with Server(ServerConfig(port=0)) as server, ScriptedEngine() as engine:
            server.attach(engine)
            async with aiohttp.ClientSession() as session:
                assert (await ask(session, server.url, "POST", TEXT, body)).status == 200
                while names and engine.health.is_ready:
                    said = break_once(engine.pipeline.stages[names.pop(0)], error)
                    with audit.armed():
                        answer = await asyncio.wait_for(ask(session, server.url, "POST", TEXT, body), 10)
                    check(answer)
                    assert said and SECRET not in answer.body.decode()
                    if engine.health.is_ready:
                        again = await asyncio.wait_for(ask(session, server.url, "POST", TEXT, body), 10)
                        assert again.status == 200
                if not engine.health.is_ready:
                    health = await ask(session, server.url, "GET", "/health", None)
                    assert health.status == 503 and SECRET not in health.body.decode()

    with captured_logs():
        names = list(STAGES)
        while names:
            asyncio.run(run(names))


def check(answer: Answer) -> None:
    if answer.status != 200:
        check_error(answer, (500, 503))
    elif answer.headers["content-type"].startswith("text/event-stream"):
        events = answer.events()
        assert events[-1] == "[DONE]"
        if "error" in events[-2]:
            check_error(Answer(500, {"content-type": "application/json"}, json.dumps(events[-2]).encode(), 0), 500)
        else:
            assert events[-2]["choices"][0]["finish_reason"] == "length"


class BrokenEngine(ScriptedEngine):
    """Whatever a route asks of it raises."""

    error: type[Exception] = RuntimeError
    is_broken = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("info", "submit", "encoder", "tokenizer", "scheduler", "abort") and object.__getattribute__(
            self, "is_broken"
        ):
            raise object.__getattribute__(self, "error")(SECRET)
        return super().__getattribute__(name)


@pytest.mark.parametrize("error", [error for error in ERRORS if issubclass(error, Exception)])
def test_a_route_that_breaks_names_the_request_and_nothing_else(audit, error):
    async def run() -> None:
        async with Server(ServerConfig(port=0)) as server, BrokenEngine() as engine:
            server.attach(engine)
            async with aiohttp.ClientSession() as session:
                for method, path, body in ROUTES:
                    await ask(session, server.url, method, path, body)
                    engine.error, engine.is_broken = error, True
                    with audit.armed():
                        answer = await asyncio.wait_for(ask(session, server.url, method, path, body), 10)
                    engine.is_broken = False
                    if answer.status == 404 and method == "DELETE":
                        continue  # it has nothing to ask of the engine
                    check_error(answer, 500)
                    assert "req-1" in answer.error["message"]
                    healthy = await ask(session, server.url, method, path, body)
                    assert healthy.status == 200

    with captured_logs() as events:
        asyncio.run(run())
    failed = [event for event in events if event["event"] == "request.failed"]
    assert failed and all(event["request_id"] == "req-1" for event in failed)
