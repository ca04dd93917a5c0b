"""WebSocket: clients that do not read, and clients that leave, at any moment."""

from __future__ import annotations

import random
import threading
import time

import pytest

from tests.counts import count, first_seed
from tests.deploy.running import RunningServer, head_bytes
from tests.generators.http_mutator import HANDSHAKE, tell
from tests.security.frames import CLOSE, frame, say, upgraded
from tests.security.test_disconnects import gone_in_time

NUM_ROUNDS = count(3, full=50)  # of 20


def create(id: str, **body: object) -> dict[str, object]:
    return {"type": "create", "id": id, "endpoint": "completions", "body": {"prompt": "a", "max_tokens": 400} | body}


def leave(server: RunningServer, messages: list[dict[str, object]], after_s: float, says_goodbye: bool) -> None:
    """Asks, and closes the connection."""
    with upgraded(server) as raw:
        for message in messages:
            raw.send(say(message))
        time.sleep(after_s)
        if says_goodbye:
            raw.send(frame(CLOSE, b"\x03\xe8"))


@pytest.mark.parametrize("says_goodbye", [False, True])
@pytest.mark.parametrize("fields", [{"n": 1}, {"n": 4}, {"prompt": "a" * 500, "max_tokens": 10}, {"max_tokens": 1}])
def test_everything_is_free_soon_after_the_client_has_left(slow_server, fields, says_goodbye):
    for after_s in (0.0, 0.1):
        leave(slow_server, [create("a", **fields), create("b", **fields)], after_s, says_goodbye)
        gone_in_time(slow_server)


@pytest.mark.slow
@pytest.mark.memory(left_mib=4 + NUM_ROUNDS / 10)  # twenty at a time leave the allocator's memory in pieces
def test_a_client_that_leaves_before_its_handshake_is_answered_is_no_error_of_ours(slow_server):
    behind = head_bytes("GET", "/health", {})  # while it is there, the handshake waits for a turn of the loop
    for _ in range(20):
        told = tell(slow_server, head_bytes("GET", "/v1/stream", HANDSHAKE) + behind)  # and says that no more comes
        assert b" 500 " not in told
    assert "request.failed" not in slow_server.errors()


def test_at_random_moments(slow_server):
    draw = random.Random(first_seed())
    for _ in range(NUM_ROUNDS):
        threads = []
        for _ in range(20):
            fields = {"prompt": "a" * draw.choice([1, 200]), "n": draw.choice([1, 3]), "max_tokens": 12}
            messages = [
                create(str(i), **fields) | {"credit": draw.choice([None, 0, 2])} for i in range(draw.randint(1, 3))
            ]
            if draw.random() < 0.2:
                messages.append({"type": "cancel", "id": "0"})
            threads.append(
                threading.Thread(target=leave, args=(slow_server, messages, draw.random() * 0.3, draw.random() < 0.5))
            )
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gone_in_time(slow_server)


def test_streams_without_credit_end_and_free_their_blocks(slow_server):
    with upgraded(slow_server) as raw:
        for i in range(20):
            raw.send(say(create(str(i), prompt=f"p{i}") | {"credit": 0}))
        codes = []
        deadline = time.monotonic() + 60
        while len(codes) < 20:
            assert time.monotonic() < deadline, codes
            codes = [m["error"]["code"] for m in raw.listen(0.1).messages if m["type"] == "error"]
        assert set(codes) == {"stalled_reader"}
        assert not any(message["type"] == "chunk" for message in raw.told.messages)
        slow_server.wait_until_idle()
