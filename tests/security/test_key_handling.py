"""Keys in odd places and shapes."""

from __future__ import annotations

import pytest

from tests.deploy.running import head_bytes
from tests.security.oracle import ADMIN_KEY, KEY, check_error
from tests.security.wire import tell

BEARER = f"Bearer {KEY}"


RESET = "/admin/cache/reset"


def not_the_key(key: str) -> list[dict[str, str]]:
    return [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": key},
        {"Authorization": f"Basic {key}"},
        {"Authorization": f"Bearer {key}x"},
        {"Authorization": f"Bearer {key[:-1]}"},
        {"Authorization": f"Bearer {key.upper()}"},
        {"Authorization": f"Bearer {key} {key}"},
        {"Authorization": f'Bearer "{key}"'},
        {"Authorization": "Bearer " + "k" * 5000},
        {"Authorization": "Bearer é漢"},
        {"x-api-key": ""},
        {"x-api-key": "é"},
        {"x-api-key": f"{key},{key}"},
        {"Cookie": f"api_key={key}"},
    ]


@pytest.mark.parametrize("headers", not_the_key(KEY), ids=lambda headers: str(headers)[:40])
def test_what_is_not_the_key_is_401(keyed_server, headers):
    answer = keyed_server.get("/v1/models", headers)
    check_error(answer, 401)
    assert answer.error["code"] == "invalid_api_key" and answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "headers", [*not_the_key(ADMIN_KEY), {"Authorization": BEARER}], ids=lambda headers: str(headers)[:40]
)
def test_what_is_not_the_admin_key_is_401_for_the_admins_routes(keyed_server, headers):
    answer = keyed_server.get(RESET, headers, "POST")
    check_error(answer, 401)
    assert answer.error["code"] == "invalid_api_key" and answer.headers["www-authenticate"] == "Bearer"


def test_a_key_in_the_query_is_no_key(keyed_server):
    for query in (
        f"?api_key={KEY}",
        f"?key={KEY}",
        f"?access_token={KEY}",
        f"?Authorization={BEARER}".replace(" ", "+"),
    ):
        check_error(keyed_server.get(f"/v1/models{query}"), 401)
        check_error(keyed_server.get(f"{RESET}{query}".replace(KEY, ADMIN_KEY), method="POST"), 401)


def test_two_keys_are_no_key(keyed_server):
    for extra in (BEARER, "Bearer wrong"):
        data = head_bytes("GET", "/v1/models", {"Authorization": BEARER, "authorization": extra, "Connection": "close"})
        check_error(tell(keyed_server, data).answer(), (400, 401))


def test_a_key_of_64_kibibytes_is_refused(keyed_server):
    data = head_bytes("GET", "/v1/models", {"Authorization": "Bearer " + "k" * 65536})
    check_error(tell(keyed_server, data).answer(), (400, 401, 431))


def test_no_key_is_in_what_the_server_tells_of_itself(keyed_server):
    answer = keyed_server.get("/server_info", {"Authorization": BEARER})
    config = answer.json["config"]["server"]
    assert config["api_key"] == config["admin_key"] == "***"
    assert KEY not in answer.body.decode() and ADMIN_KEY not in answer.body.decode()


def test_no_key_is_in_the_log(keyed_server):
    keyed_server.get("/v1/models", {"Authorization": BEARER})
    keyed_server.get("/v1/models", {"Authorization": f"Bearer wrong-{KEY}"})
    keyed_server.get(f"/nope?key={KEY}", {"Authorization": BEARER})
    for key in (ADMIN_KEY, f"wrong-{ADMIN_KEY}"):
        keyed_server.get(RESET, {"Authorization": f"Bearer {key}"}, "POST")
        keyed_server.get(f"{RESET}?key={key}", {"x-api-key": key})
    assert "cache.reset" in keyed_server.errors()
    assert KEY not in keyed_server.errors() and ADMIN_KEY not in keyed_server.errors()
