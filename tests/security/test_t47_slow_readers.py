"""T47: clients that ask for a stream and never read it. (Patience is 1 s on this server.)"""

from __future__ import annotations

import os
import socket
import statistics
import time

import pytest

from tests.deploy.running import RunningServer, post_bytes, send
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


@pytest.mark.skipif(not os.environ.get("MILLRACE_FULL"), reason="takes a minute: MILLRACE_FULL=1")
def test_a_hundred_stalled_readers_leave_nothing_behind():
    """Each is cut off, what they held is free, and a token takes those who read as long as before."""
    options = {"max_num_seqs": 256, "num_gpu_blocks": 8192, "max_num_batched_tokens": 512}
    server_options = {"stalled_reader_s": 5.0}
    with RunningServer(step_s=0.01, script={"eos_probability": 0.0}, engine=options, server=server_options) as server:

        def gap_ms() -> float:
            body = {"prompt": "b", "max_tokens": 100, "temperature": 0}
            return statistics.median(
                1e3 * server.post(TEXT, body | {"prompt": letter}).seconds / 100 for letter in "bcdef"
            )

        before = gap_ms()
        stalled = []
        try:
            for i in range(100):
                connection = socket.socket()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect(server.address)
                body = {"prompt": f"a{i}", "n": 2, "max_tokens": 500, "logprobs": 20, "stream": True}
                send(connection, post_bytes(TEXT, body))
                stalled.append(connection)
            deadline = time.monotonic() + 240
            while server.errors().count("stalled_reader") < 100:
                assert time.monotonic() < deadline, "stalled readers are still there"
                time.sleep(0.2)
            server.wait_until_idle(10.0)
            after = gap_ms()
        finally:
            for connection in stalled:
                connection.close()
    print(f"ms a token: {before:.2f} before, {after:.2f} after")
    assert abs(after - before) <= 0.1 * before + 0.5
