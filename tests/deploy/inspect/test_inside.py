"""The inspection routes: their answers, access, and what they must not reveal."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from millrace.deploy.inspect.shapes import Explanation, Requests, Stages
from millrace.runtime.trace.tracer import EventKind
from tests.deploy.running import RunningServer, post_bytes, read_answer, send
from tests.deploy.sockets import ENDLESS, Serving, on_loop, serving, until

TEXT = "/v1/completions"
SECRET = "zebra crossing"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def inside_server() -> Iterator[RunningServer]:
    """Two slots and steps of 10 ms, two clients' keys and an admin's."""
    config = {"api_key": ["key-a", "key-b"], "admin_key": ["admin"]}
    options = {"step_s": 0.01, "script": {"eos_probability": 0.0}, "engine": {"max_num_seqs": 2}}
    with RunningServer(server=config, **options) as server:
        yield server


def ask(connection: Any, key: str, name: str, max_tokens: int = 400) -> None:
    body = {"prompt": SECRET, "max_tokens": max_tokens, "stream": True, "priority": 1}
    send(connection, post_bytes(TEXT, body, bearer(key) | {"X-Request-Id": name}))


def live(server: RunningServer, key: str) -> list[dict[str, Any]]:
    told = server.get("/v1/requests", bearer(key)).json
    Requests.model_validate(told)
    return told["data"]


def test_running_requests_are_listed_with_their_state_and_without_their_text(inside_server: RunningServer):
    with inside_server.connect() as first, inside_server.connect() as second, inside_server.connect() as third:
        for connection, name in ((first, "one"), (second, "two"), (third, "three")):
            ask(connection, "key-a", name)
        for connection in (first, second):
            connection.recv(1, 2)
        answer = inside_server.get("/v1/requests", bearer("key-a"))
        one, two, three = answer.json["data"]
        assert [each["client_request_id"] for each in (one, two, three)] == ["one", "two", "three"]
        assert (one["id"], one["stage"], one["state"]) == ("cmpl-one", "execute", "running")
        assert (three["stage"], three["state"], three["num_blocks"]) == ("schedule", "waiting", 0)
        assert two["num_blocks"] >= 1 and two["num_prompt_tokens"] == len(SECRET) and two["priority"] == 1
        assert one["age_s"] >= two["age_s"] >= three["age_s"] >= 0
        assert SECRET.encode() not in answer.body
    inside_server.wait_until_idle()
    assert live(inside_server, "key-a") == []


def test_a_key_sees_its_own_requests_and_the_admins_sees_all(inside_server: RunningServer):
    with inside_server.connect() as first, inside_server.connect() as second:
        ask(first, "key-a", "mine")
        ask(second, "key-b", "yours")
        for connection in (first, second):
            connection.recv(1, 2)
        seen = {
            key: {request["client_request_id"] for request in live(inside_server, key)}
            for key in ("key-a", "key-b", "admin")
        }
        assert seen == {"key-a": {"mine"}, "key-b": {"yours"}, "admin": {"mine", "yours"}}
        nobodys = inside_server.get("/v1/requests/nobodys/explain", bearer("key-a"))
        yours = inside_server.get("/v1/requests/yours/explain", bearer("key-a"))
        assert (nobodys.status, yours.status) == (404, 404)
        assert yours.body == nobodys.body.replace(b"nobodys", b"yours")
        assert inside_server.get("/v1/requests/yours/explain", bearer("admin")).status == 200
        assert inside_server.get("/v1/requests").status == 401
    inside_server.wait_until_idle()


def test_a_request_is_explained_while_it_runs_and_after_it_ended(inside_server: RunningServer):
    with inside_server.connect() as connection:
        ask(connection, "key-a", "explained", max_tokens=20)
        connection.recv(1, 2)
        running = inside_server.get("/v1/requests/explained/explain", bearer("key-a")).json
        read_answer(connection)
    inside_server.wait_until_idle()
    answer = inside_server.get("/v1/requests/cmpl-explained/explain", bearer("key-a"))
    told = answer.json
    for each in (running, told):
        Explanation.model_validate(each)
        assert sum(bar["ms"] for bar in each["bars"]) == pytest.approx(each["total_ms"], abs=0.5)
        assert sum(cause["ms"] for cause in each["causes"]) == pytest.approx(each["total_ms"], abs=0.5)
    assert not running["finished"] and told["finished"] and told["finish_cause"] == "finish"
    assert told["steps"]["num_decode_rows"] == 19 and 1 <= told["steps"]["num_prompt_tokens"] <= len(SECRET)
    service_ms = {stage["stage"]: stage["service_ms"] for stage in told["stages"]}
    assert told["total_ms"] > 200 and told["causes"][0]["name"] == "decoding"  # 20 steps of 10 ms
    assert service_ms["execute"] > 100, "but for what of a step went on while the one before was sampled"
    assert "its own tokens took" in told["sentence"] and SECRET.encode() not in answer.body


def test_the_stages_are_told_with_what_limits_them(inside_server: RunningServer):
    connections = [inside_server.connect() for _ in range(5)]
    for number, connection in enumerate(connections):
        ask(connection, "key-a", f"load-{number}", max_tokens=60)
    for connection in connections:
        read_answer(connection)
        connection.close()
    told = inside_server.get("/v1/stages", bearer("key-b")).json
    Stages.model_validate(told)
    assert told["bottleneck"]["situation"] == "slots full", json.dumps(told["bottleneck"])
    for stage in told["stages"]:
        assert stage["idle"] + stage["busy"] + stage["blocked"] == pytest.approx(1, abs=1e-3)
    shares = {stage["name"]: stage["busy"] for stage in told["stages"]}
    assert shares["execute"] == max(shares.values()) and list(shares)[0] == "intake"
    assert {(edge["from"], edge["to"]) for edge in told["edges"]} >= {("intake", "tokenize"), ("sample", "detokenize")}
    assert told["steps"]["rows"] > 1 and told["steps"]["per_s"] > 10


def test_requests_are_listed_page_by_page_in_the_order_in_which_they_came(inside_server: RunningServer):
    connections = [inside_server.connect() for _ in range(5)]
    for number, connection in enumerate(connections):
        ask(connection, "key-a" if number != 2 else "key-b", f"page-{number}")
        until_listed(inside_server, number + 1)
    names, cursor, pages = [], "", 0
    while True:
        told = inside_server.get(f"/v1/requests?limit=2{cursor}", bearer("admin")).json
        Requests.model_validate(told)
        names += [request["client_request_id"] for request in told["data"]]
        pages += 1
        if not told["has_more"]:
            break
        if pages == 1:  # the listed requests have ended meanwhile: the next page is the same
            connections[0].close()
        cursor = f"&cursor={told['next_cursor']}"
    assert names == [f"page-{number}" for number in range(5)] and pages == 3 and told["next_cursor"] is None
    mine = inside_server.get("/v1/requests?limit=1000", bearer("key-a")).json
    assert "page-2" not in [request["client_request_id"] for request in mine["data"]] and not mine["has_more"]
    for query, param in (
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("cursor=x", "cursor"),
        ("cursor=-1", "cursor"),
    ):
        answer = inside_server.get(f"/v1/requests?{query}", bearer("key-a"))
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_value", param)
    for connection in connections[1:]:
        connection.close()
    inside_server.wait_until_idle()


def until_listed(server: RunningServer, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(live(server, "admin")) < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@on_loop
async def test_a_request_that_the_trace_has_lost_is_explained_by_what_was_noted_of_it():
    """Newer records replace those of an ended and of a running request."""
    async with serving(step_s=0.005, script=ENDLESS) as running:
        url, body = running.server.url, {"prompt": SECRET, "max_tokens": 20}
        headers = {"X-Request-Id": "done"}
        async with running.http.post(url + TEXT, json=body, headers=headers) as answer:
            assert answer.status == 200
        long = running.http.post(url + TEXT, json=body | {"max_tokens": 400}, headers={"X-Request-Id": "runs"})
        asking = asyncio.ensure_future(long)
        await until(lambda: running.engine.scheduler.num_running)
        tracer = running.engine.pipeline.tracer
        explained = await told_of(running, "done")
        assert explained["detail"] == "trace"
        tracer.emit_many(EventKind.LOOP_LAG, tracer.source("loop"), 0, np.zeros(70_000, np.int64))
        for name, is_over in (("done", True), ("runs", False)):
            explained = await told_of(running, name)
            Explanation.model_validate(explained)
            assert (explained["detail"], explained["finished"]) == ("summary", is_over), explained
            for parts in ("bars", "causes"):
                assert sum(part["ms"] for part in explained[parts]) == pytest.approx(explained["total_ms"], abs=0.01)
            assert "the trace covers only the last" in explained["sentence"]
        done = await told_of(running, "done")
        assert done["steps"]["num_decode_rows"] == 19 and done["finish_cause"] == "finish"
        decoding = next(cause for cause in done["causes"] if cause["name"] == "decoding")
        assert decoding["ms"] > 19 * 5 and "20 in total" in decoding["sentence"]
        async with running.http.get(f"{url}/v1/requests/never/explain") as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (404, "request_not_found") and "last 1,000" in error["message"]
        (await asking).close()


async def told_of(running: Serving, name: str) -> Any:
    async with running.http.get(f"{running.server.url}/v1/requests/{name}/explain") as answer:
        return await answer.json()
