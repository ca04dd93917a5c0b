"""While a server is attacked, streams of others go on at their pace.

The 99th percentile of the gaps between tokens, attacked, is at most twice what it is at rest, in turns of 0.3 s on one
server. A busy machine may spoil a measurement, so it has a few: a server that attacks hold up fails each.
"""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from tests.deploy.running import RunningServer, post_bytes, send
from tests.security.frames import say, upgraded
from tests.security.gaps import gaps_within, p99_ratio
from tests.security.oracle import ATTEMPTS, CHAT, TEXT
from tests.security.watch import warm_up

MOST = 2.0
OPTIONS = {
    "step_s": 0.01,
    "script": {"eos_probability": 0.0},
    "engine": {"max_num_seqs": 16, "num_gpu_blocks": 1024},
    "audit": True,
}
MANY_KEYS = b"{%s}" % b",".join(b'"k%d":1' % i for i in range(20_000))
REFUSED = [  # one of each family
    post_bytes(CHAT, {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 1 }}" * 1000}),
    post_bytes(TEXT, {"prompt": "a", "structured_outputs": {"regex": "(a" * 200}}),
    post_bytes(CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "x"}] * 1000}),
    post_bytes(TEXT, {"prompt": "a", "n": 10**6}),
    post_bytes(TEXT, {"prompt": ["a"] * 5000}),
    post_bytes(TEXT, b'{"prompt": "a", "temperature": NaN}'),
    post_bytes(TEXT, {"prompt": "a", "max_tokens": 2**63}),
    post_bytes(TEXT, {"prompt": "a", "stop_token_ids": [-1]}),
    post_bytes(TEXT, {"prompt": [2**31] * 1000}),
    post_bytes(TEXT, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(2000)}}),
    post_bytes(TEXT, {"prompt": "a", "stop": ["x"] * 5000}),
    post_bytes(TEXT, {"prompt": ""}),
    post_bytes(TEXT, {"prompt": "a" * 100_000}),
    post_bytes(TEXT, b"\xff\xfe"),
    post_bytes(TEXT, b"[" * 10_000),
    post_bytes(TEXT, MANY_KEYS),
    post_bytes(TEXT, json.dumps({"prompt": "a", "unknown": "x" * 100_000, "top_k": -9}).encode()),
    post_bytes(TEXT, {"prompt": "a"}, {"Content-Encoding": "gzip"}),
    post_bytes(TEXT, {"prompt": "a"}, {"Host": "elsewhere.example"}),
    post_bytes(TEXT, {"prompt": "a", "cache_salt": "/" * 1000}),
    post_bytes(TEXT, {"prompt": "a", "model": "../.." * 100}),
    b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 200 + b"\r\n",
    b"GET /\x00 HTTP/1.1\r\n\r\n",
    post_bytes(CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    post_bytes("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image"}]}]}),
]


@pytest.fixture(scope="module")
def attacked() -> Iterator[RunningServer]:
    with RunningServer(**OPTIONS) as running:
        warm_up(running, fully=True)
        yield running


def refusals(server: RunningServer) -> Callable[[], None]:
    """An attack: the next refusal of all, read to its end."""
    numbers = itertools.count()

    def attack() -> None:
        with server.connect() as connection:
            send(connection, REFUSED[next(numbers) % len(REFUSED)])
            while connection.recv(65536):
                pass

    return attack


def departures(server: RunningServer) -> Callable[[], None]:
    """Another: clients that ask and leave, over HTTP and WebSocket."""

    def attack() -> None:
        with server.connect() as connection:
            send(connection, post_bytes(TEXT, {"prompt": "b", "max_tokens": 50, "n": 4, "stream": True}))
            connection.recv(10)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        with upgraded(server) as raw:
            create = {"type": "create", "id": "a", "endpoint": "completions", "body": {"prompt": "b"}}
            raw.connection.sendall(say(create))

    return attack


@pytest.mark.slow
@pytest.mark.parametrize("kind", [refusals, departures])
def test_while_a_server_is_attacked_the_streams_of_others_keep_their_pace(attacked, kind):
    ratios = [p99_ratio(attacked, kind(attacked))]
    while ratios[-1] > MOST and len(ratios) < ATTEMPTS:
        ratios.append(p99_ratio(attacked, kind(attacked)))
    print(f"p99 gaps of canaries, attacked of at rest: {ratios}")
    assert ratios[-1] <= MOST, ratios
    attacked.wait_until_idle()


def holds(server: RunningServer) -> Callable[[], None]:
    """What no client can do: twenty steps' time in each half second, so more than one gap in a hundred is long, and
    longer than those of a busy machine."""

    def attack() -> None:
        time.sleep(0.05)  # a gap counts where both of its tokens come within the span
        server.ask("hold")
        time.sleep(0.3)

    return attack


@pytest.mark.slow
def test_an_attack_that_holds_the_loop_is_seen(attacked):
    assert any(p99_ratio(attacked, holds(attacked)) > MOST for _ in range(ATTEMPTS))


def test_only_gaps_within_a_span_count():
    arrivals = [[0.0, 1.0, 3.0, 4.0], [2.5, 3.5]]
    assert sorted(gaps_within(arrivals, [(0.0, 2.0), (2.9, 5.0)])) == [1.0, 1.0]
