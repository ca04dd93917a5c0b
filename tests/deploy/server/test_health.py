"""Health, flight recordings and injected faults of a server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from millrace.deploy.config import ServerConfig
from millrace.deploy.dashboard.snapshots import overview
from millrace.deploy.openapi.shapes.server import Ready
from millrace.deploy.server.server import Server
from millrace.runtime.env.log import captured_logs
from millrace.runtime.pipeline import Health
from millrace.runtime.startup.load_progress import LoadProgress
from millrace.stages.errors import ConfigError
from millrace.stages.testing.scripted.engine import ScriptedEngine, scripted_engine
from millrace.stages.testing.scripted.script import Script
from tests.deploy.metrics.test_metrics import of, samples_of

TEXT = "/v1/completions"
ADMIN = {"Authorization": "Bearer admin-key"}
SECRET_PROMPT = "nobody-may-read-this-anywhere"
NEVER_ENDS = Script(eos_probability=0.0)


class Client:
    """A client of a server on the same loop."""

    def __init__(self, url: str, engine: ScriptedEngine, server: Server) -> None:
        self.session = aiohttp.ClientSession(url)
        self.engine, self.server = engine, server

    async def get(self, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> tuple[int, Any]:
        async with self.session.request(method, path, headers=headers) as response:
            return response.status, await response.json()

    async def post(self, body: dict[str, Any], request_id: str = "one") -> tuple[int, Any, dict[str, str]]:
        async with self.session.post(TEXT, json=body, headers={"X-Request-Id": request_id}) as response:
            return response.status, await response.json(), dict(response.headers)

    async def scrape(self) -> dict[str, float]:
        async with self.session.get("/metrics") as response:
            return samples_of(await response.text())


@asynccontextmanager
async def served(config: dict[str, Any] | None = None, step_s: float = 0.0, **engine: Any) -> AsyncIterator[Client]:
    async with Server(ServerConfig(port=0, **config or {})) as server:
        async with scripted_engine(script=NEVER_ENDS, step_s=step_s, **engine) as scripted:
            server.attach(scripted)
            client = Client(server.url, scripted, server)
            try:
                yield client
            finally:
                await client.session.close()
                await server.stop()


async def eventually(ask: Callable[[], Awaitable[Any]], wanted: Callable[[Any], object]) -> Any:
    """Repeats a request until the answer is as wanted, for at most 60 s."""
    deadline_s = asyncio.get_running_loop().time() + 60.0
    while not wanted(found := await ask()):
        assert asyncio.get_running_loop().time() < deadline_s, f"still {found!r}"
        await asyncio.sleep(0.01)
    return found


async def flight_file(folder: Path, reason: str, logs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the file, once it is complete."""

    async def written() -> list[str]:
        return [line["path"] for line in logs if line["event"] == "flight.written" and f"-{reason}." in line["path"]]

    (path,) = await eventually(written, bool)
    assert Path(path).parent == folder
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_lost_device_is_told_by_health_metrics_and_dashboard_and_ends_each_request_once() -> None:
    illegal = RuntimeError("CUDA error: an illegal memory access was encountered")

    async def run() -> None:
        async with served(is_async=True) as client:
            assert of(await client.scrape(), "millrace:health", state="ready") == 1
            client.engine.model.streams.lose_after(200, illegal)  # type: ignore[attr-defined]
            began_s = asyncio.get_running_loop().time()
            asked = [asyncio.ensure_future(client.post({"prompt": "a", "max_tokens": 400}, f"{i}")) for i in range(3)]
            _, health = await eventually(lambda: client.get("/health"), lambda answer: answer[0] == 503)
            assert asyncio.get_running_loop().time() - began_s < 60.0
            assert health["status"] == "dead" and "an illegal memory access" in health["reason"]
            assert (await client.get("/health/live"))[0] == 503  # only a restart helps
            for status, answer, _ in await asyncio.gather(*asked):
                assert (status, answer["error"]["code"]) == (503, "dead")
                assert "an illegal memory access was encountered" in answer["error"]["message"]
            assert (await client.post({"prompt": "a"}))[0] == 503
            assert of(await client.scrape(), "millrace:health", state="dead") == 1
            shown = overview(client.engine, client.engine.status(), client.server.service.health)["health"]
            assert shown == {"state": "dead", "stage": "sample", "reason": health["reason"]}

    with captured_logs():
        asyncio.run(run())


def test_health_is_degraded_and_ready_while_some_engines_of_a_fleet_are_missing() -> None:
    engines = [{"index": 0, "pid": 7, "state": "ready", "reason": None}, {"index": 1, "state": "loading"}]
    engines[1] |= {"pid": None, "reason": "the engine process ended (signal 9), another is starting"}

    async def run() -> None:
        async with served() as client:
            client.engine.__class__ = type("TwoEngines", (type(client.engine),), {"engines": engines})
            missing = [{name: engines[1][name] for name in ("index", "state", "reason")}]
            reason = "of 2 engines engine 1 is loading: the engine process ended (signal 9), another is starting"
            due = {"status": "degraded", "reason": reason, "missing_engines": missing}
            assert await client.get("/health") == (200, due) == await client.get("/health/ready")
            assert Ready.model_validate(due).missing_engines is not None
            assert await client.get("/health/live") == (200, {"status": "alive"})
            engines[1]["state"] = "ready"
            assert await client.get("/health") == (200, {"status": "ready"})

    asyncio.run(run())


def test_the_addresses_of_missing_engines_are_told_with_the_admin_key_alone() -> None:
    engines = [{"index": index, "pid": 7, "state": "ready", "reason": None, "address": None} for index in range(3)]
    why = "engine 10.0.0.5:7000 is not reached: another key; give both the same --fleet-key-file"

    async def run() -> None:
        async with served({"admin_key": ("admin-key",)}) as client:
            client.engine.__class__ = type("Engines", (type(client.engine),), {"engines": engines})
            for engine, state in zip(engines, ("loading", "dead", "loading"), strict=True):
                engine |= {"state": state, "reason": why, "address": "10.0.0.5:7000"}
            engines[2] |= {"address": None, "reason": "its process has ended"}
            _, body = await client.get("/health/ready")
            told = ["it is not reached", "it was given up", "its process has ended"]
            assert [one["reason"] for one in body["missing_engines"]] == told and "10.0.0.5" not in str(body)
            _, body = await client.get("/health/ready", ADMIN)
            assert [one["reason"] for one in body["missing_engines"]] == [why, why, "its process has ended"]

    asyncio.run(run())


@pytest.mark.slow
def test_a_stage_that_freezes_is_named_and_a_flight_file_says_what_led_to_it(tmp_path: Path):
    config = {"stall_timeout_s": 0.4, "flight_recorder_dir": str(tmp_path), "admin_key": ("admin-key",)}

    async def run(logs: list[dict[str, Any]]) -> None:
        async with served(config, inject=("stage=detokenize,freeze",)) as client:
            for path in ("/health/ready", "/ping", "/healthz", "/readyz", "/v2/health/ready"):
                assert await client.get(path) == (200, {"status": "ready"})
            body = {"prompt": SECRET_PROMPT, "max_tokens": 400, "timeout_s": 3}
            began = asyncio.get_running_loop().time()
            asking = asyncio.ensure_future(client.post(body))
            _, health = await eventually(lambda: client.get("/health/ready"), lambda answer: answer[0] == 503)
            assert asyncio.get_running_loop().time() - began < 2.5, "0.8 s, and slack; the request ends after 3"
            assert (health["status"], health["stage"]) == ("stalled", "detokenize")
            for path in ("/health", "/ping", "/healthz", "/readyz", "/v2/health/ready"):
                assert (await client.get(path)) == (503, health)
            for path in ("/health/live", "/livez", "/v2/health/live"):
                assert (await client.get(path))[0] == 200
            status, refused, headers = await client.post(body, "two")
            assert (status, refused["error"]["code"]) == (503, "stalled") and headers["Retry-After"]
            assert of(await client.scrape(), "millrace:stalls_total") == 1

            lines = await flight_file(tmp_path, "stall", logs)
            kinds = Counter(line["type"] for line in lines)
            assert (lines[0]["reason"], lines[0]["name"]) == ("stall", "detokenize")
            assert kinds["stage"] == 8 and kinds["edge"] == 11 and kinds["request"] == 1
            assert kinds["thread"] >= 2 and kinds["task"] >= 9 and kinds["event"] >= 5
            stacks = {line["task"]: line["stack"] for line in lines if line["type"] == "task"}
            assert any("fault_injection.py" in place for place in stacks["detokenize"])
            edges = {line["edge"]: line for line in lines if line["type"] == "edge"}
            assert {item["kind"] for item in edges["sample.out->detokenize.in"]["items"]} == {"StepTokens"}
            assert SECRET_PROMPT not in json.dumps(lines) and "admin-key" not in json.dumps(lines)

            status, asked = await client.get("/admin/flight", ADMIN, "POST")
            assert status == 200 and Path(asked["file"]).exists() and "-asked." in asked["file"]
            assert await client.get("/admin/flight", ADMIN, "POST") == (200, {"file": None})
            status, answer, _ = await asking
            assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        (stalled,) = [line for line in logs if line["event"] == "pipeline.stalled"]
        assert stalled["stage"] == "detokenize" and stalled["waited_s"] >= 0.4

    with captured_logs() as logs:
        asyncio.run(run(logs))


def test_a_crash_is_one_record_with_stage_requests_and_stack_and_a_flight_file(tmp_path: Path):
    async def run(logs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        async with served({"flight_recorder_dir": str(tmp_path)}, inject=("stage=tokenize,error",)) as client:
            status, answer, _ = await client.post({"prompt": SECRET_PROMPT, "max_tokens": 5}, "guilty")
            assert (status, answer["error"]["code"]) == (500, "tokenizer_error")
            assert (await client.get("/health/ready"))[0] == 200
            return await flight_file(tmp_path, "crash", logs)

    with captured_logs() as logs:
        lines = asyncio.run(run(logs))
    first = lines[0]
    assert (first["stage"], first["error"], first["request_ids"]) == ("tokenize", "InjectedError", ["cmpl-guilty"])
    assert any("fault_injection.py" in place for place in first["stack"])
    (crash,) = [line for line in logs if line["event"] == "stage.crashed"]
    assert (crash["stage"], crash["request_ids"]) == ("tokenize", ["cmpl-guilty"]) and crash["exception"]
    assert SECRET_PROMPT not in json.dumps(lines) + repr(logs)


# the client's view of each fault, as documented
FAULTS = [
    ("stage=sample,delay=50ms", {}, 200, None),
    ("stage=intake,error", {}, 500, "internal_error"),
    ("stage=tokenize,error", {}, 500, "tokenizer_error"),
    ("stage=execute,error", {}, 500, "internal_error"),
    ("stage=sample,error", {}, 500, "internal_error"),
    ("stage=tokenize,freeze", {"timeout_s": 0.2}, 408, "request_timeout"),
    ("stage=execute,freeze", {"timeout_s": 0.2}, 504, "deadline_exceeded"),
]


@pytest.mark.parametrize(("fault", "body", "status", "code"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_each_fault_gives_its_documented_answer(fault: str, body: dict[str, Any], status: int, code: str | None):
    async def run() -> None:
        async with served(inject=(fault,)) as client:
            began = asyncio.get_running_loop().time()
            told, answer, _ = await client.post({"prompt": "a", "max_tokens": 2} | body)
            assert told == status, answer
            if code is None:
                assert asyncio.get_running_loop().time() - began > 0.1  # two steps, each late
            else:
                assert answer["error"]["code"] == code

    with captured_logs():
        asyncio.run(run())


def test_a_stage_that_fails_again_and_again_is_dead_by_name():
    async def run() -> None:
        async with served(inject=("stage=schedule,error",)) as client:
            status, answer, _ = await client.post({"prompt": "a", "max_tokens": 30})
            assert (status, answer["error"]["code"]) == (503, "dead")
            status, health = await client.get("/health")
            assert (status, health["status"], health["stage"]) == (503, "dead", "schedule")

    with captured_logs():
        asyncio.run(run())


def test_a_fault_of_a_stage_that_is_not_there_is_refused_with_those_that_are():
    async def run() -> None:
        async with scripted_engine(inject=("stage=prefill,error",)):
            pass

    with pytest.raises(ConfigError, match="inject = prefill: must name a stage, one of intake, tokenize, schedule"):
        asyncio.run(run())


def test_load_says_what_is_under_way():
    async def run() -> None:
        idle = {"server_load": 0, "waiting": 0, "running": 0, "swapped": 0, "kv_usage": 0.0, "estimated_wait_s": 0.0}
        async with served(step_s=0.005) as client:
            assert await client.get("/load") == (200, idle)
            asking = asyncio.ensure_future(client.post({"prompt": "a" * 40, "n": 3, "max_tokens": 60}))
            _, load = await eventually(lambda: client.get("/load"), lambda answer: answer[1]["running"] == 3)
            assert load["server_load"] == 1 and 0 < load["kv_usage"] < 0.1
            await asking
            await eventually(lambda: client.get("/load"), lambda answer: answer[1] == idle)

    asyncio.run(run())


def logged(logs: list[dict[str, Any]], event: str) -> dict[str, dict[str, Any]]:
    return {line["request_id"]: line for line in logs if line["event"] == event}


@pytest.mark.slow
def test_requests_are_logged_from_begin_to_end_and_their_prompts_only_if_asked():
    async def run(num_tokens: int, **config: Any) -> list[dict[str, Any]]:
        with captured_logs() as logs:
            async with served({"stats_interval_s": 0.2} | config, step_s=0.005) as client:
                await client.post({"prompt": SECRET_PROMPT, "max_tokens": num_tokens}, "one")
                await client.post({"prompt": [5] * 600}, "two")
        return logs

    logs = asyncio.run(run(120, log_prompts=6))
    assert logged(logs, "request.began")["cmpl-one"]["prompts"] == [SECRET_PROMPT[:6]]
    assert SECRET_PROMPT[:7] not in repr(logs)
    one, two = logged(logs, "request.ended")["cmpl-one"], logged(logs, "request.ended")["cmpl-two"]
    assert (one["cause"], one["finish_reasons"], one["num_generated_tokens"]) == ("finish", ["length"], 120)
    assert one["generation_time_ms"] > 0
    assert (two["cause"], two["error"]) == ("error", "context_length_exceeded")
    stats = [line for line in logs if line["event"] == "engine.stats"]
    assert any(line["num_running"] == 1 and line["generated_tokens_per_s"] > 0 for line in stats)
    assert "prompts" not in logged(asyncio.run(run(1)), "request.began")["cmpl-one"]
    assert not logged(asyncio.run(run(1, log_requests=False)), "request.ended")


@pytest.mark.slow
def test_a_server_at_rest_says_nothing_of_itself():
    async def run(logs: list[dict[str, Any]]) -> None:
        async with served({"stats_interval_s": 0.1}) as client:
            await client.post({"prompt": "a", "max_tokens": 2})

            async def said() -> int:
                num_lines = len(logs)
                await asyncio.sleep(0.4)
                return len(logs) - num_lines

            await eventually(said, lambda num_lines: num_lines == 0 and logs[-1]["event"] == "engine.stats")

    with captured_logs() as logs:
        asyncio.run(run(logs))


@pytest.mark.slow
def test_a_loop_that_stands_still_is_noticed_from_beside_it(tmp_path: Path):
    async def run(logs: list[dict[str, Any]]) -> None:
        import time

        async with served({"stall_timeout_s": 0.3, "flight_recorder_dir": str(tmp_path)}) as client:
            await asyncio.sleep(0.2)
            time.sleep(0.8)
            lines = await flight_file(tmp_path, "loop", logs)
            (stack,) = [line["stack"] for line in lines if line.get("thread") == "MainThread"]
            assert stack[-1].endswith(" run") and "test_health.py" in stack[-1]
            scraped = await client.scrape()
            lag_s = of(scraped, "millrace:event_loop_lag_seconds_sum")
            assert lag_s > 0.6 and of(scraped, "millrace:event_loop_lag_seconds_count") >= 2
            assert (await client.get("/health/ready"))[0] == 200  # it continues, and nothing stalls

    with captured_logs() as logs:
        asyncio.run(run(logs))


@pytest.mark.slow
def test_a_loop_that_stands_still_behind_a_stopped_engine_has_nothing_to_record(tmp_path: Path, monkeypatch):
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)

    async def run() -> None:
        import time

        async with served({"stall_timeout_s": 0.2, "flight_recorder_dir": str(tmp_path)}) as client:
            await client.engine.stop()
            time.sleep(0.6)

    asyncio.run(run())
    assert not errors and not [*tmp_path.iterdir()]


def test_collections_of_garbage_and_the_start_are_among_the_metrics():
    async def run() -> None:
        import gc

        async with served() as client:
            before = of(await client.scrape(), "millrace:gc_pause_seconds_count")
            gc.collect()
            after = await client.scrape()
            assert of(after, "millrace:gc_pause_seconds_count") > before
            assert of(after, "millrace:startup_seconds", phase="pipeline") > 0

    asyncio.run(run())


def test_health_says_how_far_a_model_is_loaded_until_there_is_an_engine() -> None:
    progress = LoadProgress(lambda: 0.0)

    async def run() -> None:
        async with Server(ServerConfig(port=0)) as server, aiohttp.ClientSession(server.url) as session:
            server.service.load_progress = progress
            progress.begin("read", {"model-00001.safetensors": 8, "model-00002.safetensors": 8})
            progress.add("model-00001.safetensors", 4)
            async with session.get("/health/ready") as response:
                found = await response.json()
            assert response.status == 503 and found["status"] == "loading"
            assert found["reason"] == "the model is loading: reading weights, 25 % of 0.0 GB, 0 MB/s"
            assert (found["progress"]["phase"], found["progress"]["percent"]) == ("read", 25.0)
            assert found["progress"]["files"]["model-00001.safetensors"] == {"num_bytes": 4, "total_bytes": 8}
            async with session.get("/health/live") as response:
                assert response.status == 200
            async with scripted_engine(script=NEVER_ENDS) as scripted:
                server.attach(scripted)
                async with session.get("/health") as response:
                    assert await response.json() == {"status": "ready"}

    asyncio.run(run())


def test_a_front_without_an_engine_says_why_it_waits() -> None:
    why, details = (
        "the engines are not reached",
        "engine 10.0.0.5:7000: another key; give both the same --fleet-key-file",
    )
    health = Health("loading", stage="engine", reason=why, details=details)

    async def run() -> None:
        config = ServerConfig(port=0, admin_key=("admin-key",))
        async with Server(config) as server, aiohttp.ClientSession(server.url) as session:
            server.service.why_waiting = lambda: health
            for headers, told in ((None, why), ({"Authorization": "Bearer another"}, why), (ADMIN, details)):
                async with session.get("/health/ready", headers=headers) as response:
                    assert response.status == 503
                    assert await response.json() == {"status": "loading", "stage": "engine", "reason": told}
            async with session.post("/v1/completions", json={"prompt": "a"}) as response:
                error = (await response.json())["error"]
            assert response.status == 503 and response.headers["Retry-After"] == "1"
            assert (error["code"], error["message"]) == (
                "loading",
                f"no engine takes requests now: {why}; try again shortly",
            )

    asyncio.run(run())


def test_a_mistyped_field_is_logged_counted_and_named_to_its_client() -> None:
    async def run() -> None:
        async with served() as client:
            with captured_logs() as lines:
                body = {"prompt": "a", "max_tokens": 1, "max_tokns": 3}
                for _ in range(2):
                    async with client.session.post("/v1/completions", json=body) as response:
                        assert response.status == 200 and response.headers["X-Ignored-Fields"] == "max_tokns"
            told = [line for line in lines if line["event"] == "request.unknown_field"]
            assert [(line["field"], line["perhaps_meant"]) for line in told] == [("max_tokns", "max_tokens")]
            assert of(await client.scrape(), "millrace:ignored_fields_total") == 2

    asyncio.run(run())
