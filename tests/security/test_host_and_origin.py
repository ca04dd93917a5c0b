"""What a foreign page can make its reader's browser ask. Refused before any handler, so before an
upgrade to a WebSocket too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from aiohttp.test_utils import make_mocked_request

from millrace.deploy.config import ServerConfig
from millrace.deploy.errors import ApiError
from millrace.deploy.http.origin_check import OriginCheck
from millrace.stages.errors import ConfigError
from tests.deploy.running import Answer, RunningServer, post_bytes
from tests.security.oracle import CHAT, KEY, TEXT, check_error, refused
from tests.security.watch import watched
from tests.security.wire import tell

CHAT_PAGE, OTHER_PAGE = "https://chat.example.com", "https://other.example.com:8443"
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


def ask(
    server: RunningServer, method: str, path: str, host: str | None, headers: dict[str, str] | None = None
) -> Answer:
    lines = [f"{method} {path} HTTP/1.1", *([] if host is None else [f"Host: {host}"])]
    lines += [f"{name}: {value}" for name, value in ({"Connection": "close"} | (headers or {})).items()]
    return server.raw(("\r\n".join(lines) + "\r\n\r\n").encode())


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.2", "169.254.169.254", "[::2]", "0.0.0.0"],
)
def test_a_foreign_host_is_403(server, host):
    for method, path in (
        ("GET", "/health"),
        ("GET", "/v1/models"),
        ("POST", CHAT),
        ("OPTIONS", TEXT),
        ("GET", "/nope"),
    ):
        refused(server, lambda m=method, p=path: ask(server, m, p, host), 403, code="host_not_allowed")


@pytest.mark.parametrize("host", ["localhost", "LocalHost:1", "127.0.0.1", "127.0.0.1:65535", "[::1]", "[::1]:80"])
def test_the_names_of_loopback_are_its_own(server, host):
    assert ask(server, "GET", "/health", host).status == 200


@pytest.mark.parametrize(
    "host", ["", "a/?", "a b", "localhost:x", "localhost:123456", "[::1", "a@localhost", "é", "a" * 300]
)
def test_a_host_that_is_none_is_400(server, host):
    check_error(ask(server, "GET", "/health", host), 400)


def test_a_request_without_a_host_is_400_unless_it_is_http_1_0(server):
    check_error(ask(server, "GET", "/health", None), 400)
    assert tell(server, b"GET /health HTTP/1.0\r\n\r\n").answer().status == 200


def test_the_host_of_an_absolute_target_counts_too(server):
    check_error(ask(server, "GET", "http://evil.example/health", "localhost"), 403)
    check_error(ask(server, "GET", "http://user@localhost/health", "localhost"), 400)
    assert ask(server, "GET", "http://localhost/health", "localhost").status == 200


@pytest.mark.parametrize(
    "origin",
    [
        CHAT_PAGE,
        "http://localhost:3000",
        "http://localhost.evil.example",
        "null",
        "",
        "file://",
        "http://localhost@evil",
    ],
)
def test_a_foreign_origin_is_403_and_learns_nothing(server, origin):
    for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("OPTIONS", CHAT), ("GET", "/v1/stream")):
        answer = ask(server, method, path, "localhost:8000", {"Origin": origin})
        check_error(answer, 403)
        assert not [name for name in answer.headers if name.startswith("access-control")]
    body = {"prompt": "a", "max_tokens": 1}
    refused(server, lambda: server.post(TEXT, body, {"Origin": origin}), 403, code="origin_not_allowed")


@pytest.mark.parametrize("path", ["/v1/stream", "/v1/responses", "/nope"])
def test_an_upgrade_from_a_foreign_page_or_to_a_foreign_host_is_403(server, path):
    check_error(ask(server, "GET", path, "localhost", UPGRADE | {"Origin": CHAT_PAGE}), 403)
    check_error(ask(server, "GET", path, "evil.example", UPGRADE), 403)


def test_a_page_of_its_own_is_no_foreign_one(server):
    for host, origin in (("localhost:8000", "http://localhost:8000"), ("localhost", "https://localhost:443")):
        answer = ask(server, "GET", "/v1/models", host, {"Origin": origin})
        assert answer.status == 200 and "access-control-allow-origin" not in answer.headers
    check_error(ask(server, "GET", "/v1/models", "localhost:8000", {"Origin": "http://localhost:8001"}), 403)


@pytest.fixture(scope="module")
def cors_server() -> Iterator[RunningServer]:
    options = {"api_key": [KEY], "cors_allow_origin": [CHAT_PAGE], "allowed_origin": [OTHER_PAGE]}
    with RunningServer(server=options | {"allowed_host": ["box.lan"]}, audit=True) as running:
        with watched(running, {"Authorization": f"Bearer {KEY}"}):
            yield running


def test_a_preflight_is_answered_without_a_key_and_only_for_its_page(cors_server):
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-os"}
    answer = ask(cors_server, "OPTIONS", CHAT, "box.lan", asked | {"Origin": CHAT_PAGE})
    assert answer.status == 204 and answer.headers["access-control-allow-origin"] == CHAT_PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
    assert "access-control-allow-credentials" not in answer.headers and answer.headers["vary"] == "Origin"
    check_error(ask(cors_server, "OPTIONS", CHAT, "box.lan", asked | {"Origin": "https://evil.example"}), 403)
    check_error(ask(cors_server, "OPTIONS", CHAT, "evil.example", asked | {"Origin": CHAT_PAGE}), 403)
    check_error(ask(cors_server, "OPTIONS", CHAT, "box.lan", {"Origin": CHAT_PAGE}), 401)  # no preflight
    answer = ask(cors_server, "OPTIONS", CHAT, "box.lan", asked | {"Origin": OTHER_PAGE})
    check_error(answer, 401)  # may ask, but its page may not read
    assert "access-control-allow-origin" not in answer.headers


def test_a_preflight_echoes_no_header_that_is_none(cors_server):
    asked = {"Origin": CHAT_PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "a b, <c>"}
    answer = ask(cors_server, "OPTIONS", CHAT, "box.lan", asked)
    assert answer.status == 204 and "access-control-allow-headers" not in answer.headers


def test_the_answers_to_its_page_are_readable_whatever_they_are(cors_server):
    headers = {"Authorization": f"Bearer {KEY}", "Origin": CHAT_PAGE}
    for body, status in (
        ({"prompt": "a", "max_tokens": 1}, 200),
        ({"prompt": "a", "max_tokens": 1, "stream": True}, 200),
        ({"prompt": ""}, 400),
    ):
        answer = tell(cors_server, post_bytes(TEXT, body, headers)).answer()
        assert answer.status == status and answer.headers["access-control-allow-origin"] == CHAT_PAGE
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    unkeyed = ask(cors_server, "GET", "/v1/models", "localhost", {"Origin": CHAT_PAGE})
    check_error(unkeyed, 401)
    assert unkeyed.headers["access-control-allow-origin"] == CHAT_PAGE
    answer = tell(
        cors_server, post_bytes(TEXT, {"prompt": "a", "max_tokens": 1}, headers | {"Origin": OTHER_PAGE})
    ).answer()
    assert answer.status == 200 and "access-control-allow-origin" not in answer.headers


def passes(config: ServerConfig, host: str, origin: str | None = None) -> bool:
    headers = {"Host": host} | ({} if origin is None else {"Origin": origin})
    try:
        OriginCheck.of(config).check(make_mocked_request("GET", "/", headers=headers))
    except ApiError as error:
        assert error.status == 403
        return False
    return True


def test_who_may_call_depends_on_where_the_server_listens():
    everywhere = ServerConfig(host="0.0.0.0", api_key=("k",))
    assert passes(everywhere, "anything.example")
    named = ServerConfig(host="0.0.0.0", api_key=("k",), allowed_host=("Box.lan",))
    assert passes(named, "box.LAN:8000") and passes(named, "localhost") and not passes(named, "evil.example")
    assert passes(ServerConfig(host="127.0.0.5"), "127.0.0.5") and not passes(ServerConfig(), "127.0.0.5")
    assert passes(ServerConfig(host="::1"), "[::1]:8000")
    assert passes(ServerConfig(uds="/tmp/x"), "whatever")
    assert passes(ServerConfig(allowed_host=("*",)), "evil.example")


def test_any_origin_may_be_let_in_by_a_star():
    assert passes(ServerConfig(allowed_origin=("*",)), "localhost", "null")
    assert passes(ServerConfig(cors_allow_origin=("*",)), "localhost", CHAT_PAGE)
    assert not passes(ServerConfig(), "localhost", CHAT_PAGE)


@pytest.mark.parametrize(
    "setting",
    [
        {"allowed_host": ("localhost:8000",)},
        {"allowed_host": ("http://a",)},
        {"allowed_origin": ("chat.example.com",)},
        {"cors_allow_origin": ("https://chat.example.com/",)},
    ],
)
def test_a_name_of_the_wrong_form_is_refused_at_the_start(setting):
    (name,) = setting
    with pytest.raises(ConfigError, match=name):
        ServerConfig(**setting)
