"""Clients that leave, at any moment. What they asked for is gone within a second."""

from __future__ import annotations

import random
import threading
import time

import pytest

from tests.counts import count, first_seed
from tests.deploy.running import RunningServer, post_bytes, read_answer, send
from tests.security.oracle import TEXT

GONE_S = 1.0
LONG = {"prompt": "a", "max_tokens": 400}


def leave(server: RunningServer, body: dict, after_s: float, wait_for_bytes: bool = False) -> None:
    """Asks, and closes the connection."""
    with server.connect() as connection:
        send(connection, post_bytes(TEXT, body))
        if wait_for_bytes:
            connection.recv(1)
        time.sleep(after_s)


def gone_in_time(server: RunningServer) -> None:
    """The second is one of the server's own clock, that of a machine that is not busy with others."""
    assert server.wait_until_idle() <= GONE_S


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_while_decoding(slow_server, stream, n):
    leave(slow_server, LONG | {"stream": stream, "n": n}, 0.3, wait_for_bytes=stream)
    gone_in_time(slow_server)


@pytest.mark.parametrize("stream", [False, True])
def test_while_prefilling(slow_server, stream):
    leave(slow_server, LONG | {"prompt": "a" * 500, "max_tokens": 10, "stream": stream}, 0.03)
    gone_in_time(slow_server)


def test_while_queued(slow_server):
    """Two slots are taken; a third request leaves before it ever runs, and the two go on."""
    with slow_server.connect() as first, slow_server.connect() as second:
        for connection in (first, second):
            send(connection, post_bytes(TEXT, LONG | {"max_tokens": 150, "stream": True}))
            connection.recv(1, 2)
        for stream in (False, True):
            leave(slow_server, LONG | {"stream": stream}, 0.1)
        assert slow_server.wait_until_held({"admitted": 2}) <= GONE_S
        for connection in (first, second):
            assert read_answer(connection).events()[-2]["choices"][0]["finish_reason"] == "length"
    slow_server.wait_until_idle()


def test_after_the_last_token(slow_server):
    for stream in (False, True):
        leave(slow_server, LONG | {"max_tokens": 1, "stream": stream}, 0.1)
        gone_in_time(slow_server)


def test_before_the_body_has_arrived(slow_server):
    with slow_server.connect() as connection:
        send(connection, post_bytes(TEXT, LONG)[:-10])
        time.sleep(0.05)
    gone_in_time(slow_server)


def test_with_a_pipelined_request_behind(slow_server):
    data = post_bytes(TEXT, LONG, {"Connection": "keep-alive"})
    with slow_server.connect() as connection:
        send(connection, data * 3)
        time.sleep(0.1)
    gone_in_time(slow_server)


@pytest.mark.slow
def test_at_random_moments(slow_server):
    draw = random.Random(first_seed())

    def one(after_s: float, stream: bool, n: int, num_prompt: int) -> None:
        leave(slow_server, LONG | {"prompt": "a" * num_prompt, "max_tokens": 12, "stream": stream, "n": n}, after_s)

    for _ in range(count(5, full=50)):  # of 20
        threads = [
            threading.Thread(
                target=one, args=(draw.random() * 0.3, draw.random() < 0.5, draw.choice([1, 3]), draw.choice([1, 200]))
            )
            for _ in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gone_in_time(slow_server)
    assert slow_server.post(TEXT, LONG | {"max_tokens": 2}).status == 200
