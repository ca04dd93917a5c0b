"""Many connections that send a byte now and then. (Header and body time are 1 s on this server.)"""

from __future__ import annotations

import select
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from tests.counts import FULL
from tests.deploy.running import Answer, RunningServer, head_bytes, read_answer, send
from tests.security.conftest import CanaryStreams
from tests.security.oracle import TEXT, check_error
from tests.security.watch import watched
from tests.security.wire import Told, listen

BEGUN = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: "  # well-formed so far: what goes wrong is the time


def trickling_headers(server: RunningServer) -> list[Told]:
    connections = [server.connect() for _ in range(30)]
    began = time.monotonic()
    try:
        for connection in connections:
            send(connection, BEGUN)
        while time.monotonic() - began < 1.5:
            for connection in connections:
                send(connection, b"X")
            time.sleep(0.2)
        return [listen(connection, 60.0) for connection in connections]
    finally:
        for connection in connections:
            connection.close()


def half_a_header(server: RunningServer) -> Answer:
    with server.connect() as connection:
        send(connection, b"GET /health HTTP/1.1\r\nHost:")
        return read_answer(connection)


def trickling_body(server: RunningServer) -> Answer:
    with server.connect() as connection:
        head = head_bytes("POST", TEXT, {"Content-Type": "application/json", "Content-Length": "1000"})
        send(connection, head)
        for _ in range(8):
            send(connection, b" ")
            time.sleep(0.2)
        return read_answer(connection)


def silence(server: RunningServer) -> Told:
    with server.connect() as connection:
        return listen(connection, 60.0)


@pytest.fixture(scope="module")
def found(slow_server: RunningServer) -> dict[str, Any]:
    """What became of each by its name, as all it does is wait: side by side."""
    waiting = (trickling_headers, half_a_header, trickling_body, silence)
    with ThreadPoolExecutor(len(waiting)) as threads:
        results = {wait.__name__: threads.submit(wait, slow_server) for wait in waiting}
    return {name: result.result() for name, result in results.items()}


def test_headers_that_trickle_are_given_up(slow_server, found):
    assert len(found["trickling_headers"]) == 30
    for told in found["trickling_headers"]:
        assert told.is_closed and (not told.data or told.status == 408)
    assert slow_server.get("/health").status == 200


def test_headers_that_trickle_are_told_why(found):
    assert 0.9 < found["half_a_header"].seconds < 60.0
    check_error(found["half_a_header"], 408)


def test_a_body_that_trickles_is_given_up(found):
    check_error(found["trickling_body"], 408)


def test_a_connection_without_a_request_is_closed(found):
    told = found["silence"]
    assert told.is_closed and not told.data and told.seconds > 0.9


def is_served(server: RunningServer) -> bool:
    with suppress(ConnectionError):
        return server.get("/health").status == 200
    return False


def test_connections_over_the_limit_are_turned_away(slow_server):
    connections = []
    try:
        statuses = set()
        for _ in range(80):
            connection = slow_server.connect()
            connections.append(connection)
            send(connection, head_bytes("GET", "/version", {}))
        for connection in connections:
            try:
                statuses.add(read_answer(connection).status)
            except ConnectionError:
                statuses.add(503)  # reset before it was read
        assert statuses == {200, 503}
    finally:
        for connection in connections:
            connection.close()
    deadline = time.monotonic() + 60
    while not is_served(slow_server):  # until it has seen them go
        assert time.monotonic() < deadline


# Pages that 500 connections took at once and that hold a few objects of others: 6.5 MiB. As many again leave no more.
LEFT_MIB = 12.0


@pytest.mark.skipif(not FULL, reason="takes 40 s: MILLRACE_FULL=1")
@pytest.mark.parametrize(
    ("first", "limit_s"),
    [
        (BEGUN, 10.0),
        (head_bytes("POST", TEXT, {"Content-Type": "application/json", "Content-Length": "1000"}), 30.0),
    ],
    ids=["headers", "body"],
)
def test_500_clients_of_a_byte_a_second_are_cut_off_and_others_do_not_notice(first, limit_s):
    """With the limits as they are by default; streams run beside them."""
    with (
        RunningServer(step_s=0.001, audit=True) as server,
        watched(server, left_mib=LEFT_MIB),
        CanaryStreams(server, num=8) as canaries,
    ):
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
