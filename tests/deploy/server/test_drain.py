"""What was taken in before a shutdown is answered within its limit; nothing new is taken in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest

from millrace.deploy.config import ServerConfig
from millrace.deploy.server.server import Server
from millrace.stages.grammar.gate import GrammarGate
from millrace.stages.testing.scripted.engine import ScriptedEngine, scripted_engine
from millrace.stages.testing.scripted.script import Script

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"prompt": "abc", "max_tokens": 30, "temperature": 0}
JSON = {"Content-Type": "application/json"}


class Draining:
    """A server, its engine, a client, and the drain once it has begun."""

    def __init__(self, server: Server, engine: ScriptedEngine, session: aiohttp.ClientSession) -> None:
        self.server, self.engine, self.session = server, engine, session
        self.drain: asyncio.Task[bool] | None = None

    async def begin(self) -> asyncio.Task[bool]:
        """Begins to drain, as SIGTERM does."""
        self.drain = asyncio.create_task(self.server.drain())
        await asyncio.sleep(0)
        assert self.server.service.is_draining
        return self.drain

    def post(self, path: str, body: Any) -> asyncio.Task[tuple[int, Any]]:
        """Sends a request in a task of its own: status and body of its answer."""

        async def send() -> tuple[int, Any]:
            async with self.session.post(path, json=body) as response:
                return response.status, await response.json()

        return asyncio.create_task(send())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(path) as response:
            return response.status, await response.json()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60.0):
            while not condition():  # noqa: ASYNC110 - threads and the engine make it true
                await asyncio.sleep(0.001)

    async def until_live(self, num: int = 1) -> None:
        """Waits until so many requests run in the engine."""
        await self.until(lambda: len(self.engine.parts.exit.live) >= num)


@asynccontextmanager
async def served(step_s: float = 0.002, **config: Any) -> AsyncIterator[Draining]:
    async with (
        Server(ServerConfig(port=0, **config)) as server,
        scripted_engine(script=Script(eos_probability=0.0), step_s=step_s) as engine,
        aiohttp.ClientSession(server.url) as session,
    ):
        server.attach(engine)
        yield Draining(server, engine, session)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30.0))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, PROMPT | {"return_token_ids": True}),
        (TEXT, PROMPT | {"echo": True}),
        (TEXT, PROMPT | {"prompt_logprobs": 1}),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "return_token_ids": True}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 30}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "model": "scripted", "max_tokens": 30}),
        ("/generate", {"token_ids": [97, 98], "max_tokens": 30}),
    ],
)
def test_an_answer_under_way_is_given(path: str, body: dict[str, Any]) -> None:
    async def test() -> None:
        async with served() as at:
            before = at.post(path, body)
            await at.until_live()
            drain = await at.begin()
            assert not before.done()
            status, answer = await before
            assert status == 200, answer
            assert await drain

    run(test)


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "abc"}), ("/detokenize", {"tokens": [97]}), (TEXT, PROMPT)]
)
def test_a_body_that_was_still_arriving_is_answered(path: str, body: dict[str, Any]) -> None:
    async def test() -> None:
        async with served() as at:
            goes_on = asyncio.Event()

            async def parts() -> AsyncIterator[bytes]:
                data = orjson.dumps(body)
                yield data[:5]
                await goes_on.wait()
                yield data[5:]

            sending = asyncio.ensure_future(at.session.post(path, data=parts(), headers=JSON))
            await at.until(lambda: at.server.service.num_handlers)
            drain = await at.begin()
            await asyncio.sleep(0.01)
            assert not drain.done(), "the request has come in before"
            goes_on.set()
            async with await sending as response:
                assert response.status == 200
            assert await drain

    run(test)


def test_tokenization_in_a_thread_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with served() as at:
            has_begun, goes_on, encode = threading.Event(), threading.Event(), type(at.engine.tokenizer).encode

            def slow(*args: Any) -> Any:
                has_begun.set()
                goes_on.wait(10.0)
                return encode(*args)

            monkeypatch.setattr(type(at.engine.tokenizer), "encode", slow)
            asked = at.post("/tokenize", {"prompt": "abc"})
            await at.until(has_begun.is_set)
            drain = await at.begin()
            await asyncio.sleep(0.01)
            goes_on.set()
            assert await asked == (200, {"count": 3, "max_model_len": 512, "tokens": [97, 98, 99], "token_strs": None})
            assert await drain

    run(test)


def test_a_request_whose_grammar_is_tried_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with served() as at:
            goes_on, tried = asyncio.Event(), asyncio.Event()

            async def trial(self: GrammarGate, *_: object) -> int:
                tried.set()
                await goes_on.wait()
                return 1000

            monkeypatch.setattr(GrammarGate, "_run_trial", trial)
            asked = at.post(TEXT, PROMPT | {"structured_outputs": {"choice": ["yes"]}})
            await tried.wait()
            drain = await at.begin()
            await asyncio.sleep(0.01)
            goes_on.set()
            assert (await asked)[0] == 200
            assert await drain

    run(test)


def test_a_background_response_can_be_fetched_and_the_drain_waits_for_that() -> None:
    async def test() -> None:
        async with served() as at:
            body = {"input": "hi", "max_output_tokens": 30, "background": True}
            status, queued = await at.post("/v1/responses", body)
            assert (status, queued["status"]) == (200, "queued")
            drain = await at.begin()
            path = f"/v1/responses/{queued['id']}"
            seen = []
            while not seen or seen[-1] in ("queued", "in_progress"):
                assert not drain.done(), "its client has not fetched it yet"
                status, response = await at.get(path)
                assert status == 200
                seen.append(response["status"])
            assert seen[-1] == "incomplete" and len(response["output"][0]["content"][0]["text"]) > 10
            assert await drain
            assert (await at.get(path + "/input_items"))[0] == 200

    run(test)


@pytest.mark.slow
def test_a_response_that_is_not_fetched_ends_the_drain_at_its_limit() -> None:
    async def test() -> None:
        async with served(step_s=0.0, shutdown_timeout_s=0.2) as at:
            _, queued = await at.post("/v1/responses", {"input": "a", "max_output_tokens": 1, "background": True})
            await at.until(lambda: not at.server.service.live)
            began_s = asyncio.get_running_loop().time()
            assert await (await at.begin())
            assert 0.15 < asyncio.get_running_loop().time() - began_s < 25.0
            assert (await at.get(f"/v1/responses/{queued['id']}"))[0] == 200

    run(test)


def test_what_is_left_at_the_limit_is_refused_and_not_cut_off() -> None:
    async def test() -> None:
        async with served(shutdown_timeout_s=0.05) as at:

            async def parts() -> AsyncIterator[bytes]:
                yield b"{"
                await asyncio.sleep(20.0)

            sending = asyncio.ensure_future(at.session.post("/tokenize", data=parts(), headers=JSON))
            running = at.post(TEXT, PROMPT | {"max_tokens": 400})
            await at.until(lambda: at.server.service.num_handlers == 2)
            assert not await (await at.begin())
            async with await sending as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"], response.headers["Connection"]) == (503, "draining", "close")
            status, answer = await running
            assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")

    run(test)


def test_a_client_that_keeps_its_connection_is_refused_and_told_to_close_it() -> None:
    async def test() -> None:
        async with served() as at:
            first = at.post(TEXT, PROMPT | {"max_tokens": 400})
            assert (await at.get("/health"))[0] == 200  # this connection stays open
            await at.until_live()
            await at.begin()
            for path in (TEXT, "/tokenize"):
                async with at.session.post(path, json=PROMPT) as response:
                    assert response.status == 503
                    assert response.headers["Connection"] == "close"
                    assert int(response.headers["Retry-After"]) >= 1
            first.cancel()

    run(test)


@pytest.mark.slow
def test_nothing_new_is_taken_in() -> None:
    async def test() -> None:
        async with served(admin_key=("k",)) as at:
            posts = [route.path for route in at.server._routes.table() if route.method == "POST"]
            running = at.post(TEXT, PROMPT | {"max_tokens": 400})
            await at.until_live()
            await at.begin()
            for path in posts:
                if path.endswith("/cancel"):
                    continue
                async with at.session.post(path.replace("{digest}", "x"), json={}) as response:
                    error = (await response.json())["error"]  # a text on Ollama's routes
                    code = "draining" if isinstance(error, str) else error.get("code", "draining")
                    assert (response.status, code) == (503, "draining"), path
            for path in ("/v1/stream", "/v1/responses"):
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    await at.session.ws_connect(path)
                assert refused.value.status == 503
            for path in ("/v1/models", "/server_info", "/v1/stages", "/v1/requests", "/load", "/openapi.json"):
                assert (await at.get(path))[0] == 200, path
            running.cancel()

    run(test)


def test_a_socket_ends_its_request_and_starts_no_other() -> None:
    async def test() -> None:
        async with served() as at, at.session.ws_connect("/v1/stream") as socket:
            create = {"type": "create", "id": "a", "endpoint": "completions", "body": PROMPT}
            await socket.send_json(create)
            await at.until_live()
            drain = await at.begin()
            await socket.send_json(create | {"id": "b"})
            ends: dict[str, Any] = {}
            while len(ends) < 2:
                message = await socket.receive_json()
                if message["type"] in ("done", "error"):
                    ends[message["id"]] = message
            assert ends["a"]["reason"] == "finish"
            assert ends["b"]["error"]["code"] == "draining"
            assert await drain

    run(test)
