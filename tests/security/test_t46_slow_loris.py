"""T46: many connections that send a byte now and then. (Header and body time are 1 s on this server.)"""

from __future__ import annotations

import os
import select
import time

import pytest

from tests.deploy.running import RunningServer, head_bytes, read_answer, send
from tests.security.conftest import CanaryStreams
from tests.security.oracle import TEXT, check_error
from tests.security.wire import listen

BEGUN = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: "  # well-formed so far: what goes wrong is the time


def test_headers_that_trickle_are_given_up(slow_server):
    connections = [slow_server.connect() for _ in range(30)]
    began = time.monotonic()
    try:
        for connection in connections:
            send(connection, BEGUN)
        while time.monotonic() - began < 1.5:
            for connection in connections:
                send(connection, b"X")
            time.sleep(0.2)
        for connection in connections:
            told = listen(connection, 5.0)
            assert told.is_closed and (not told.data or told.status == 408)
        assert slow_server.get("/health").status == 200
    finally:
        for connection in connections:
            connection.close()


def test_headers_that_trickle_are_told_why(slow_server):
    with slow_server.connect() as connection:
        send(connection, b"GET /health HTTP/1.1\r\nHost:")
        answer = read_answer(connection)
        assert 0.9 < answer.seconds < 6.0
    check_error(answer, 408)


def test_a_body_that_trickles_is_given_up(slow_server):
    with slow_server.connect() as connection:
        head = head_bytes("POST", TEXT, {"Content-Type": "application/json", "Content-Length": "1000"})
        send(connection, head)
        for _ in range(8):
            send(connection, b" ")
            time.sleep(0.2)
        check_error(read_answer(connection), 408)


def test_a_connection_without_a_request_is_closed(slow_server):
    with slow_server.connect() as connection:
        told = listen(connection, 6.0)
    assert told.is_closed and not told.data and told.seconds > 0.9


def test_connections_over_the_limit_are_turned_away(slow_server):
    connections = []
    try:
        statuses = set()
        for _ in range(80):
            connection = slow_server.connect()
            connections.append(connection)
            send(connection, head_bytes("GET", "/health", {}))
        for connection in connections:
            try:
                statuses.add(read_answer(connection).status)
            except ConnectionError:
                statuses.add(503)  # reset before it was read
        assert statuses == {200, 503}
    finally:
        for connection in connections:
            connection.close()
    time.sleep(0.2)
    assert slow_server.get("/health").status == 200


@pytest.mark.skipif(not os.environ.get("MILLRACE_FULL"), reason="takes 40 s: MILLRACE_FULL=1")
@pytest.mark.parametrize(
    ("first", "limit_s"),
    [
        (BEGUN, 10.0),
        (head_bytes("POST", TEXT, {"Content-Type": "application/json", "Content-Length": "1000"}), 30.0),
    ],
    ids=["headers", "body"],
)
def test_five_hundred_that_send_a_byte_a_second_are_given_up_and_nobody_notices(first, limit_s):
    """With the limits as they are by default; streams run beside them."""
    with RunningServer(step_s=0.001) as server, CanaryStreams(server, num=8) as canaries:
        began, ends = time.monotonic(), []  # before the first of them: connecting takes a while, too
        connections = [server.connect() for _ in range(500)]
        try:
            for connection in connections:
                send(connection, first)
            while len(ends) < len(connections) and time.monotonic() - began < limit_s + 20:
                for connection in connections:
                    send(connection, b"X")
                time.sleep(1.0)
                waiting = [connection for connection in connections if connection not in ends]
                readable, _, _ = select.select(waiting, [], [], 0)
                if readable:
                    assert time.monotonic() - began > limit_s - 1
                ends += readable
            assert len(ends) == len(connections) and time.monotonic() - began < limit_s + 15
        finally:
            for connection in connections:
                connection.close()
    assert not canaries.complaints and canaries.num_finished > 8
