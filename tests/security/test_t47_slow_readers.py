"""T47: clients that ask for a stream and never read it. (Patience is 1 s on this server.)"""

from __future__ import annotations

import socket
import time

from tests.deploy.running import post_bytes, send
from tests.security.oracle import TEXT


def test_a_reader_that_stalls_is_cut_off_and_holds_nobody_back(slow_server):
    # with logprobs these make about 1.5 MiB, more than the buffers between us
    body = {"prompt": "a", "n": 2, "max_tokens": 500, "logprobs": 20, "stream": True}
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(slow_server.address)
        send(connection, post_bytes(TEXT, body, {"X-Request-Id": "stalled"}))
        deadline = time.monotonic() + 30
        while "stalled_reader" not in slow_server.errors():
            assert time.monotonic() < deadline, "the reader was not cut off"
            time.sleep(0.05)
        assert slow_server.wait_until_idle() < 2.0
    answer = slow_server.post(TEXT, {"prompt": "a", "max_tokens": 2})
    assert answer.status == 200
