"""Headers of excessive size or number."""

from __future__ import annotations

import pytest

from tests.deploy.running import head_bytes, read_answer, send
from tests.security.oracle import TEXT, check_error
from tests.security.wire import tell

KIB = 1024


def with_header(name: str, size: int) -> bytes:
    return head_bytes("GET", "/health", {name: "x" * size})


@pytest.mark.parametrize(
    "data",
    [
        with_header("X-Long", 1024 * KIB),
        with_header("X-Long", 9 * KIB),
        with_header("x" * 9 * KIB, 1),
        b"GET /" + b"a" * 9 * KIB + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /" + b"a" * 1024 * KIB,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
        + b"".join(b"X-%d: %s\r\n" % (i, b"v" * 4000) for i in range(5))
        + b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 100_000 + b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 101 + b"\r\n",
        b"A" * 1024 * KIB,
    ],
    ids=["1 MiB", "9 KiB", "name", "target", "endless target", "block", "100,000", "101", "no HTTP"],
)
def test_headers_over_the_limits_are_refused_and_the_connection_closes(server, data):
    told = tell(server, data)
    assert told.is_closed and told.num_responses == 1
    check_error(told.answer(), (400, 431))
    assert server.get("/health").status == 200


def test_an_endless_header_is_cut_off_after_sixteen_kibibytes(server):
    with server.connect() as connection:
        send(connection, b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        line = b"X-A: " + b"v" * 1017 + b"\r\n"  # 1 KiB
        for _ in range(17):
            send(connection, line)
        answer = read_answer(connection)
    check_error(answer, 431)


@pytest.mark.parametrize("name", ["Expect", "Upgrade", "Connection", "Sec-WebSocket-Version", "Sec-WebSocket-Key"])
def test_bytes_beyond_ascii_in_a_header_of_names_are_refused_and_no_error_of_ours(server, name):
    handshake = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    key = {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
    for path in ("/health", "/nope", "/v1/stream", TEXT):
        for value in (b"websocket\xff", b"\xff", "é".encode()):
            head = head_bytes("GET", path, handshake | key | {name: "MARK"})
            told = tell(server, head.replace(b"MARK", value) + head_bytes("GET", "/health", {}))
            assert told.is_closed and told.num_responses == 1
            check_error(told.answer(), 400)
    log = server.errors()
    assert "unhandled error" not in log and "request.failed" not in log


def test_an_unknown_expectation_is_417_in_our_words_on_every_route(server):
    for method, path in (("GET", "/health"), ("GET", "/nope"), ("GET", "/v1/stream"), ("POST", TEXT)):
        for value in ("x", "100-continue, x", "<b>"):
            told = tell(server, head_bytes(method, path, {"Expect": value}) + head_bytes("GET", "/health", {}))
            assert told.is_closed and told.num_responses == 1
            check_error(told.answer(), 417)
            assert b"<b>" not in told.answer().body


def test_of_two_expectations_each_is_looked_at_and_a_body_that_still_comes_is_not_the_next_request(server):
    head = head_bytes("POST", TEXT, {"Expect": "100-continue", "Content-Length": "4000"})
    told = tell(server, head[:-2] + b"Expect: x\r\n\r\n" + head_bytes("GET", "/health", {}) * 60)
    assert told.is_closed and told.num_responses == 1
    check_error(told.answer(), 417)


def test_a_client_of_http_1_0_that_expects_to_go_on_is_told_nothing_it_does_not_know(server):
    head = head_bytes("POST", TEXT, {"Expect": "100-continue", "Content-Length": "2"}).replace(b"HTTP/1.1", b"HTTP/1.0")
    told = tell(server, head + b"{}")
    assert told.num_responses == 1 and told.answer().status >= 400


def test_bytes_beyond_ascii_in_any_other_header_are_let_through(server):
    head = head_bytes("GET", "/health", {"X-Name": "MARK", "Connection": "close"}).replace(b"MARK", b"Jos\xe9")
    assert tell(server, head).answer().status == 200


def test_headers_within_the_limits_are_served(server):
    for data in (
        with_header("X-Long", 8000),
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 90 + b"\r\n",
    ):
        with server.connect() as connection:
            send(connection, data)
            assert read_answer(connection).status == 200


def test_a_request_in_single_bytes_is_served(server):
    with server.connect() as connection:
        for byte in head_bytes("GET", "/health", {"X-A": "b"}):
            send(connection, bytes([byte]))
        assert read_answer(connection).status == 200
