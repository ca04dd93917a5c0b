"""The routes that look inside: what they tell, to whom, and what they keep to themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from millrace.deploy.inside_shapes import Explanation, Requests, Stages
from tests.deploy.running import RunningServer, post_bytes, read_answer, send

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


def test_requests_under_way_are_told_with_their_state_and_without_a_word_of_their_text(inside_server: RunningServer):
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
    execute = next(stage for stage in told["stages"] if stage["stage"] == "execute")
    assert execute["service_ms"] > 190 and told["causes"][0]["name"] == "decoding"  # 20 steps of 10 ms
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
