"""The admin routes: effects and access."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.running import RunningServer, post_bytes, read_answer, send

RESET, TEXT = "/admin/cache/reset", "/v1/completions"
ADMIN = {"Authorization": "Bearer admin-key"}


@pytest.fixture(scope="module")
def admin_server() -> Iterator[RunningServer]:
    """A server with an admin key and none for its clients, whose answers take time."""
    config = {"admin_key": ["admin-key"], "log_format": "json"}
    with RunningServer(server=config, step_s=0.005, script={"eos_probability": 0.0}) as running:
        yield running


def found(server: RunningServer, prompt: str) -> int:
    """Tokens of the prompt that were in the cache."""
    answer = server.post(TEXT, {"prompt": prompt, "max_tokens": 1})
    tokens: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_a_reset_frees_what_was_cached_and_counts_it(admin_server: RunningServer):
    admin_server.post(RESET, {}, ADMIN)
    prompt = "told again and again" + "." * 50
    assert [found(admin_server, prompt) for _ in range(2)] == [0, 69]
    cached = admin_server.get("/server_info").json["blocks"]["cached"]
    assert cached >= 4
    answer = admin_server.get(RESET, ADMIN, "POST")
    assert (answer.status, answer.json) == (200, {"freed_blocks": cached})
    blocks = admin_server.get("/server_info").json["blocks"]
    assert (blocks["cached"], blocks["free"]) == (0, blocks["num_blocks"])
    assert admin_server.get(RESET, ADMIN, "POST").json == {"freed_blocks": 0}
    assert found(admin_server, prompt) == 0
    assert f'"freed_blocks":{cached}' in admin_server.errors()


@pytest.mark.parametrize(("query", "status", "code"), [("", 404, "not_found"), ("?by=force", 400, "invalid_value")])
def test_only_an_engine_of_a_fleet_is_drained(admin_server: RunningServer, query: str, status: int, code: str):
    answer = admin_server.get(f"/admin/engines/0/drain{query}", ADMIN, "POST")
    assert (answer.status, answer.json["error"]["code"]) == (status, code)


def test_requests_under_way_go_on_through_a_reset(admin_server: RunningServer):
    body = {"prompt": "once" * 20, "temperature": 0, "max_tokens": 60, "cache_salt": "undisturbed"}
    alone = admin_server.post(TEXT, body).json["choices"][0]["text"]
    with admin_server.connect() as connection:
        send(connection, post_bytes(TEXT, body | {"stream": True}))
        connection.recv(1, 2)  # MSG_PEEK: wait until it has begun
        for _ in range(5):
            assert admin_server.get(RESET, ADMIN, "POST").status == 200
        events = read_answer(connection).events()
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == alone
    admin_server.wait_until_idle()


def test_a_wrong_key_or_none_is_401_and_resets_nothing(admin_server: RunningServer):
    prompt = "kept" + "." * 60
    found(admin_server, prompt)
    for headers in ({}, {"Authorization": "Bearer admin-key2"}, {"x-api-key": "admin"}):
        answer = admin_server.get(RESET, headers, "POST")
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert "admin key" in answer.error["message"]
    assert found(admin_server, prompt) > 0


def test_without_an_admin_key_there_is_no_such_route(server: RunningServer):
    for headers in ({}, ADMIN):
        answer = server.get(RESET, headers, "POST")
        assert (answer.status, answer.error["code"]) == (404, "not_found")


def test_only_post_resets(admin_server: RunningServer):
    answer = admin_server.get(RESET, ADMIN)
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
