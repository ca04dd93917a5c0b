"""Whatever clients send, the metrics stay the same few series, and short."""

from __future__ import annotations

import json
import random

import pytest

from tests.counts import count
from tests.deploy.running import head_bytes, post_bytes
from tests.security.oracle import CHAT, TEXT
from tests.security.wire import tell

NUM = count(200, full=100_000)
BATCH = 20  # pipelined
MAX_BYTES = 256 * 1024
LETTERS = "abc/.:%-_ é漢\"'{}=<>\\"


def names(metrics: str) -> set[str]:
    """Each series, with its labels and without its value."""
    return {line.rpartition(" ")[0] for line in metrics.splitlines() if line and not line.startswith("#")}


@pytest.mark.slow
def test_random_requests_add_no_series(server):
    draw = random.Random(49)

    def word() -> str:
        return "".join(draw.choice(LETTERS) for _ in range(draw.randint(1, 30)))

    def request() -> bytes:
        keep = {"Connection": "keep-alive", "X-Request-Id": word().replace("\n", "")}
        if draw.random() < 0.5:
            path = "/" + "".join(draw.choice("abcxyz/.-_%20") for _ in range(20))
            method = draw.choice(["GET", "PUT", "FOO", "DELETE", "PATCH", "ZZ" + str(draw.randint(0, 10**6))])
            return head_bytes(method, path, keep | {"Content-Length": "0"})
        body = {"model": word(), "user": word(), "request_id": word(), word(): word()}
        body |= draw.choice([{}, {"prompt": "a", "max_tokens": 1, "model": None}, {"messages": [], "stop": word()}])
        return post_bytes(draw.choice([TEXT, CHAT, "/tokenize"]), json.dumps(body).encode(), keep)

    def ask() -> int:
        """How many of a batch were answered: after one that is no HTTP the connection ends."""
        last = head_bytes("GET", "/nope", {"Connection": "close"})
        return tell(server, b"".join(request() for _ in range(BATCH)) + last).num_responses

    before = names(server.get("/metrics").body.decode())
    num_answered = 0
    while num_answered < NUM:
        num_answered += ask()
    metrics = server.get("/metrics").body
    assert names(metrics.decode()) == before
    assert len(metrics) <= MAX_BYTES
