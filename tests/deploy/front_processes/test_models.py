"""Several models behind one server: each has fronts of its own, and any front passes a request to the right one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from millrace.deploy.cli.machines.addresses import engines_by_model
from millrace.deploy.config import ServerConfig
from millrace.deploy.front_processes.front_metrics import add_ended, packed, rendered
from millrace.deploy.front_processes.models import ModelFronts, model_in
from millrace.deploy.front_processes.supervisor import ServerPlan
from millrace.deploy.front_processes.words import FrontState
from millrace.deploy.http.body_reader import BODY as BODY_READ
from millrace.deploy.http.json_limits import MAX_CONTAINERS
from millrace.deploy.metrics.families import counter, engines, gauge
from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError
from millrace.stages.params import SamplingParams
from millrace.stages.testing.scripted.engine import SMALL, ScriptedEngine
from millrace.stages.testing.scripted.script import Script
from tests.deploy.front_processes.local_fronts import LocalFronts, local_fronts
from tests.deploy.sockets import on_loop

CONFIG = ServerConfig(port=0, api_key=("key",), admin_key=("admin",))
KEY = {"Authorization": "Bearer key"}
SCRIPTS = {"small": Script(), "org/large": Script(key=1)}
PROMPT = "Zoe and 1"
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


class Client:
    """Asks either front."""

    def __init__(self, fronts: LocalFronts, http: aiohttp.ClientSession) -> None:
        self.servers, self._urls, self._http = fronts.servers, fronts.urls, http

    async def ask(self, front: int, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        method, url = "GET" if body is None else "POST", self._urls[front] + path
        async with self._http.request(method, url, json=body, headers=KEY | headers) as answer:
            if answer.content_type != "application/json":
                return answer.status, (await answer.read()).decode()
            return answer.status, await answer.json()


@asynccontextmanager
async def served(
    config: ServerConfig = CONFIG, step_s: float = 0.0
) -> AsyncIterator[tuple[Client, list[ScriptedEngine]]]:
    """Two models; front i has the model i."""
    small, large = (ScriptedEngine(SMALL, script, step_s=step_s) for script in SCRIPTS.values())
    async with (
        small,
        large,
        local_fronts([small, large], config, models=list(SCRIPTS)) as fronts,
        aiohttp.ClientSession() as http,
    ):
        yield Client(fronts, http), [small, large]


def text_of(model: str) -> str:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    return bytes(SCRIPTS[model].expected(list(PROMPT.encode()), params)).decode(errors="replace")


@on_loop
async def test_either_front_answers_for_both_models_whole_and_as_a_stream() -> None:
    async with served() as (client, _):
        for front in (0, 1):
            for model in SCRIPTS:
                status, answer = await client.ask(front, "/v1/completions", BODY | {"model": model})
                assert (status, answer["model"], answer["choices"][0]["text"]) == (200, model, text_of(model))
                status, events = await client.ask(front, "/v1/completions", BODY | {"model": model, "stream": True})
                assert status == 200 and events.rstrip().endswith("data: [DONE]") and f'"{model}"' in events
        status, answer = await client.ask(1, "/v1/completions", BODY)
        assert (status, answer["model"]) == (200, "small"), "without a name it is the first model"


@on_loop
async def test_the_models_are_those_of_all_fronts_and_others_are_refused_by_naming_them() -> None:
    async with served() as (client, _):
        for front in (0, 1):
            _, listed = await client.ask(front, "/v1/models")
            assert [row["id"] for row in listed["data"]] == list(SCRIPTS), "in one order at all fronts"
            for path in ("/api/tags", "/api/ps"):
                _, listed = await client.ask(front, path)
                assert [row["name"] for row in listed["models"]] == [f"{name}:latest" for name in SCRIPTS]
            for field in ("model", "name"):
                status, shown = await client.ask(front, "/api/show", {field: "org/large"})
                assert status == 200 and "FROM org/large" in shown["modelfile"]
            for model in SCRIPTS:
                assert (await client.ask(front, f"/v1/models/{model}"))[1]["id"] == model
            for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", {"messages": []})):
                status, answer = await client.ask(front, path, body | {"model": "other"})
                assert status == 404 and answer["error"]["code"] == "model_not_found"
                assert "the models are small, org/large" in answer["error"]["message"]
            assert (await client.ask(front, "/v1/models/other"))[0] == 404
        async with client._http.post(client._urls[0] + "/v1/completions", data=b"{", headers=KEY) as answer:
            assert answer.status in (400, 415)


@on_loop
async def test_responses_keys_and_pages_are_those_of_the_model_that_has_them() -> None:
    async with served() as (client, _):
        _, first = await client.ask(0, "/v1/responses", {"model": "org/large", "input": "hi", "max_output_tokens": 4})
        status, again = await client.ask(0, f"/v1/responses/{first['id']}")
        assert status == 200 and again["model"] == "org/large"
        keyed = {"Idempotency-Key": "once"}
        _, one = await client.ask(0, "/v1/completions", BODY | {"model": "org/large"}, **keyed)
        _, two = await client.ask(1, "/v1/completions", BODY | {"model": "org/large"}, **keyed)
        assert one["id"] == two["id"] and one["model"] == "org/large"
        status, info = await client.ask(0, "/server_info?model=org/large")
        assert status == 200 and info["process"]["front"] == 1
        for front in (0, 1):
            status, answer = await client.ask(front, f"/v1/responses/{first['id']}/cancel", {})
            assert (status, answer["error"]["code"]) == (400, "invalid_value"), "it is over, and known at both"
        _, metrics = await client.ask(0, "/metrics")
        labels = {
            sample.labels["model_name"]: sample.value
            for family in text_string_to_metric_families(metrics)
            for sample in family.samples
            if sample.name == "vllm:generation_tokens_total"
        }
        assert labels == {"small": 0.0, "org/large": 12.0}


@on_loop
async def test_a_key_has_one_keeper_among_the_fronts_of_its_model_also_while_one_is_away() -> None:
    names = ["small", "org/large", "org/large"]
    async with AsyncExitStack() as stack, aiohttp.ClientSession() as http:
        engines = [await stack.enter_async_context(ScriptedEngine(SMALL, SCRIPTS[name])) for name in names]
        fronts = await stack.enter_async_context(local_fronts(engines, CONFIG, models=names))
        client = Client(fronts, http)

        async def ids(front: int) -> list[str]:
            body = BODY | {"model": "org/large", "max_tokens": 1}
            keys = [f"key-{number}" for number in range(8)]
            answers = [await client.ask(front, "/v1/completions", body, **{"Idempotency-Key": key}) for key in keys]
            return [answer["id"] for _, answer in answers]

        first = await ids(1)
        for away in (1, 2):
            fronts.tell([replace(one, state="loading" if one.number == away else "ready") for one in fronts.states])
            while (await client.ask(0, "/health"))[1]["fronts"][away]["state"] != "loading":  # noqa: ASYNC110
                pass
            assert await ids(0) == first


@on_loop
async def test_the_prefix_caches_of_all_models_are_emptied_at_once() -> None:
    async with served() as (client, _):
        for model in SCRIPTS:
            await client.ask(0, "/v1/completions", BODY | {"model": model, "prompt": "a long beginning " * 2})
        status, found = await client.ask(1, "/admin/cache/reset", {}, Authorization="Bearer admin")
        assert status == 200 and found["freed_blocks"] > 2
        assert (await client.ask(0, "/admin/cache/reset", {}, Authorization="Bearer admin"))[1] == {"freed_blocks": 0}


def test_a_model_without_a_ready_front_is_503_and_names_may_have_ollamas_tag() -> None:
    states = [FrontState(0, 1, "ready", None, 0, ("a",)), FrontState(1, 2, "loading", "it loads", 0, ("b",))]
    models = ModelFronts(states)
    assert models.has_several and models.group_of(None) == models.group_of("a:latest") == [0]
    assert models.ready(models.group_of("a"), "a") == [0]
    with pytest.raises(Exception, match="model b takes no requests now") as away:
        models.ready(models.group_of("b"), "b")
    assert away.value.status == 503  # type: ignore[attr-defined]
    assert not ModelFronts([replace(state, models=()) for state in states]).has_several  # type: ignore[type-var]


def test_metrics_of_engines_are_told_apart_by_their_models() -> None:
    figures = dict.fromkeys(("num_requests", "num_deaths", "num_expected_cached_tokens"), 2)
    one = {"index": 0, "address": "x:1", "labels": {}, "state": "ready"} | figures
    data = packed([*engines([one]), counter("a", "", 3.0, {}), gauge("b", "", 4.0, {"model_name": "m"})])
    states = [FrontState(number, 1, "ready", None, 0, (model,)) for number, model in enumerate(("m", "m", "n"))]
    lines = rendered(dict.fromkeys(range(3), data), b"[]", states).decode().splitlines()
    assert 'millrace:engine_up{engine="m/0"} 1.0' in lines and 'millrace:engine_up{engine="n/0"} 1.0' in lines
    assert 'millrace:engine_requests{engine="m/0"} 4.0' in lines, "two fronts have requests in it"
    assert "a_total 9.0" in lines and 'b{model_name="m"} 12.0' in lines
    ended = add_ended(b"[]", data, "n")
    lines = rendered({0: data}, ended, states).decode().splitlines()
    assert {line.split()[0] for line in lines if "expected_cached_tokens_total{" in line} == {
        'millrace:engine_expected_cached_tokens_total{engine="m/0"}',
        'millrace:engine_expected_cached_tokens_total{engine="n/0"}',
    }, "as long as the fronts of one model have told nothing, too"


@on_loop
async def test_what_is_about_all_models_does_without_one_that_waits_for_its_engine() -> None:
    async with served() as (client, engines):
        client.servers[1].service.engine = None
        for front in (0, 1):
            status, listed = await client.ask(front, "/v1/models")
            assert status == 200 and [row["id"] for row in listed["data"]] == ["small"]
            status, found = await client.ask(front, "/admin/cache/reset", {}, Authorization="Bearer admin")
            assert (status, found) == (200, {"freed_blocks": 0})
        client.servers[0].service.engine = None
        assert (await client.ask(0, "/v1/models"))[0] == 503
        for server, engine in zip(client.servers, engines, strict=True):
            server.service.engine = engine


@on_loop
async def test_a_body_beyond_the_limits_of_json_is_not_parsed_for_its_model() -> None:
    class Read(dict[Any, bytes]):
        content_type = "application/json"

    for num_arrays, model in ((MAX_CONTAINERS - 2, "large"), (MAX_CONTAINERS, None)):
        request: Any = Read({BODY_READ: b'{"model": "large", "x": [' + b",".join([b"[]"] * num_arrays) + b"]}"})
        assert await model_in(request, "/v1/completions", CONFIG) == model, "its parser would hold up all streams"


@on_loop
async def test_an_engine_is_not_drained_by_an_index_that_each_model_has() -> None:
    async with served() as (client, _):
        for front in (0, 1):
            status, answer = await client.ask(front, "/admin/engines/0/drain", {}, Authorization="Bearer admin")
            assert status == 400 and "by its address" in answer["error"]["message"]


@on_loop
async def test_a_body_that_is_passed_on_is_read_within_the_limit_of_time() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.sleep(60.0)

    async with served(replace(CONFIG, body_timeout_s=0.1)) as (client, _):
        headers = KEY | {"Content-Type": "text/plain"}
        async with client._http.post(client._urls[1] + "/v1/completions", data=slow(), headers=headers) as answer:
            assert answer.status == 408 and (await answer.json())["error"]["code"] == "request_timeout"


@on_loop
async def test_a_socket_that_is_passed_on_keeps_its_session() -> None:
    async with served() as (client, engines):
        seen: list[str] = []
        engines[1].exit.on_open.append(lambda outbox: seen.append(outbox.request.session))
        url, headers = client._urls[0] + "/v1/responses?model=org/large", KEY | {"X-Session-Id": "mine"}
        async with client._http.ws_connect(url, headers=headers) as socket:
            await socket.send_json({"type": "response.create", "input": "hi", "max_output_tokens": 4})
            while (await socket.receive_json())["type"] != "response.incomplete":
                pass
        assert seen == ["mine"]


@on_loop
async def test_a_client_that_closes_a_socket_passed_on_ends_its_requests() -> None:
    async with served(step_s=0.2) as (client, engines):
        create = {"type": "create", "id": "x", "endpoint": "completions", "resume": True}
        url = client._urls[0] + "/v1/stream?model=org/large"
        async with client._http.ws_connect(url, headers=KEY, protocols=("millrace.v1",)) as socket:
            await socket.send_json(create | {"body": BODY | {"max_tokens": 200}})
            while (await socket.receive_json())["type"] != "chunk":
                pass
            assert engines[1].exit.live
        async with asyncio.timeout(20.0):  # half of what all tokens take
            while engines[1].exit.live:  # noqa: ASYNC110
                await asyncio.sleep(0.002)


def test_engines_are_named_by_their_model_or_none_is() -> None:
    assert engines_by_model(["10.0.0.5:7000", "dns:a:7000", "file:/x=y"]) == {}
    named = ["small=10.0.0.5:7000", "org/large:8b=dns:large:7000", "small=file:/x=y"]
    assert engines_by_model(named) == {"small": ["10.0.0.5:7000", "file:/x=y"], "org/large:8b": ["dns:large:7000"]}
    with pytest.raises(ConfigError, match="names no model, and others do; write MODEL=10.0.0.6:7000"):
        engines_by_model([*named, "10.0.0.6:7000"])
    with pytest.raises(ConfigError, match="a model's name"):
        engines_by_model(["-x=10.0.0.6:7000"])


def test_fronts_take_turns_among_the_models() -> None:
    plan = ServerPlan(
        front_module="",
        core_module="",
        engine_config=EngineConfig(),
        server_config=ServerConfig(front_processes=4, allow_no_key=True),
        sources={},
        models={"a": ["x:1"], "b": ["y:1"]},
    )
    assert [plan.model_of(number) for number in range(4)] == ["a", "b", "a", "b"]
    assert replace(plan, models={}).model_of(1) is None
