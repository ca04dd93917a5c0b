"""Every spelling of every route, without a key."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.security.oracle import ADMIN_KEY, KEY, check_error
from tests.security.wire import tell

RESET = "/admin/cache/reset"
TELL_OF_REQUESTS = {("GET", "/v1/requests"): 200, ("GET", "/v1/requests/x/explain"): 404}  # the admin sees all of them
VARYING = ("date", "x-request-id")  # headers that differ between any two answers
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/scripted"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/x"),
    ("DELETE", "/v1/responses/x"),
    ("POST", "/v1/responses/x/cancel"),
    ("GET", "/v1/responses/x/input_items"),
    ("GET", "/v1/stream"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/version"),
    ("GET", "/server_info"),
    ("GET", "/metrics"),
    ("DELETE", "/v1/requests/x"),
    ("GET", "/v1/requests"),
    ("GET", "/v1/requests/x/explain"),
    ("GET", "/v1/stages"),
    ("POST", RESET),
    ("GET", "/nope"),
]
HOSTS = ["localhost", "a/?", "a?/health", "/health", "health", "localhost/health", "[::1]", "x" * 300, "", "é"]


def spellings(path: str) -> list[str]:
    return [
        path,
        path + "/",
        "/" + path,
        "/." + path,
        "/health/.." + path,
        "/health/%2e%2e" + path,
        "/%2e" + path,
        path.replace("/v1", "/V1"),
        path.upper(),
        path + "?/health",
        path + "#/health",
        path + "%00",
        path + ";/health",
        path + "/../health/..",
        path.replace("o", "%6f"),
        "http://localhost" + path,
        "http://localhost/health/.." + path,
        "http://health" + path,
        path + "?x=/health/live",
        "/health" + path,
        "/health/live" + path,
        "/health%2f.." + path,
        "\\health" + path,
    ]


def ask(method: str, target: str, host: str = "localhost", headers: Mapping[str, str] | None = None) -> bytes:
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    return (
        f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: 0\r\n{more}\r\n".encode()
    )


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_spelling_of_a_route_opens_it(keyed_server, method, path):
    for target in spellings(path):
        told = tell(keyed_server, ask(method, target))
        assert told.num_responses == 1
        check_error(told.answer(), (400, 401, 403))


@pytest.mark.parametrize("host", HOSTS)
def test_no_host_opens_a_route(keyed_server, host):
    for method, path in ROUTES:
        check_error(tell(keyed_server, ask(method, path, host)).answer(), (400, 401, 403))


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "PATCH", "TRACE", "CONNECT", "FOO", "get"])
def test_no_method_opens_a_route(keyed_server, method):
    for _, path in ROUTES:
        told = tell(keyed_server, ask(method, path))
        assert told.num_responses == 1 and told.status in (400, 401)


def test_health_and_pages_alone_are_open(keyed_server):
    for path in ("/health", "/health/live", "/health/ready"):
        assert keyed_server.get(path).status == 200
        assert keyed_server.get(path, method="HEAD").status == 200
    for path in (
        "/health",
        "/stream-demo",
        "/static/stream.js",
        "/static/no",
        "/static/a/b",
    ):  # a method that is none asks for no key
        assert keyed_server.get(path, method="TRACE").status == 405
    for path in ("/health/", "/health/nope", "//health", "/Health"):
        assert keyed_server.get(path).status == 401


def test_the_key_opens_every_route_but_those_of_the_admin(keyed_server):
    for headers in ({"Authorization": f"Bearer {KEY}"}, {"authorization": f"bearer {KEY}"}, {"X-Api-Key": KEY}):
        assert keyed_server.get("/v1/models", headers).status == 200
        assert keyed_server.get("/metrics", headers).status == 200
        assert keyed_server.get("/server_info", headers).status == 200
        assert keyed_server.get("/nope", headers).status == 404
        assert keyed_server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers).status == 200
        for target in spellings(RESET):
            told = tell(keyed_server, ask("POST", target, headers=headers))
            assert told.num_responses == 1
            check_error(told.answer(), (400, 401, 403, 404))
        check_error(keyed_server.get(RESET, headers, "POST"), 401)


def test_the_admin_key_opens_the_admins_routes_and_those_that_tell_of_requests_and_nothing_else(keyed_server):
    for headers in ({"Authorization": f"Bearer {ADMIN_KEY}"}, {"X-Api-Key": ADMIN_KEY}):
        answer = keyed_server.get(RESET, headers, "POST")
        assert answer.status == 200 and set(answer.json) == {"freed_blocks"}
        for method, path in ROUTES:
            if (method, path) in TELL_OF_REQUESTS:
                assert keyed_server.get(path, headers, method).status == TELL_OF_REQUESTS[method, path]
            elif path != RESET:
                check_error(keyed_server.get(path, headers, method), 401)
        for method in ("GET", "PUT", "DELETE"):  # no route, so the key of all others is asked for
            check_error(keyed_server.get(RESET, headers, method), 401)


def test_without_an_admin_key_its_routes_answer_as_paths_that_are_not_there(server):
    for method in ("POST", "GET", "PUT", "OPTIONS"):
        for headers in ({}, {"Authorization": f"Bearer {ADMIN_KEY}"}, {"X-Api-Key": ""}):
            missing, admins = (server.get(path, headers, method) for path in ("/admin/nope", RESET))
            check_error(admins, 404)
            assert (admins.status, admins.body) == (missing.status, missing.body)
            told = [
                {name: answer.headers[name] for name in answer.headers if name not in VARYING}
                for answer in (missing, admins)
            ]
            assert told[0] == told[1]
