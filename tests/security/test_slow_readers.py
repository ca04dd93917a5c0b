"""Clients that ask for a stream and never read it. (Patience is 1 s on this server.)"""

from __future__ import annotations

import socket
import statistics
import time

import pytest

from tests.counts import FULL
from tests.deploy.running import RunningServer, post_bytes, send
from tests.security.oracle import CHAT, TEXT
from tests.security.watch import PEAK_MIB, watched

VERBOSE = {
    "messages": [{"role": "user", "content": "a"}],
    "logprobs": True,
    "top_logprobs": 20,  # 1.2 kB a token
    "stream": True,
}


def test_a_reader_that_stalls_is_cut_off_and_leaves_nothing_behind(slow_server):
    body = VERBOSE | {"n": 2, "max_tokens": 440}  # about 1 MiB, more than the buffers between us
    before = slow_server.errors().count("stalled_reader")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(slow_server.address)
        send(connection, post_bytes(CHAT, body))
        deadline = time.monotonic() + 30
        while slow_server.errors().count("stalled_reader") == before:
            assert time.monotonic() < deadline, "the reader was not cut off"
            time.sleep(0.05)
        assert slow_server.wait_until_idle() < 2.0
    answer = slow_server.post(TEXT, {"prompt": "a", "max_tokens": 2})
    assert answer.status == 200


NUM_STALLED = 100
MIN_PAIRS, MAX_PAIRS = 5, 30
PATIENT = {
    "step_s": 0.005,
    "script": {"eos_probability": 0.0},
    "engine": {"max_num_seqs": 256, "num_gpu_blocks": 16_384, "max_num_batched_tokens": 512, "max_model_len": 2048},
    "audit": True,
}
ANSWER = {"prompt": "b", "max_tokens": 20, "temperature": 0}
BUFFER_MIB = 1.0  # of a reader, at most
# Little of that is given back to the system: 100 readers leave 22 to 73 MiB, and as many again 1 more: no leak, but
# pages that hold a few objects of others. What is live is counted below.
LIMITS = {"peak_mib": PEAK_MIB + NUM_STALLED * BUFFER_MIB, "left_mib": NUM_STALLED * BUFFER_MIB}


def stall(server: RunningServer, i: int) -> socket.socket:
    """A client that never reads what it asks for."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(server.address)
    send(connection, post_bytes(CHAT, VERBOSE | {"max_tokens": 1000, "user": str(i)}))
    return connection


def num_parked(server: RunningServer) -> int:
    lines = server.get("/metrics").body.decode().splitlines()
    (value,) = (line.split()[-1] for line in lines if line.startswith("millrace:num_requests_parked"))
    return int(float(value))


def step_ratio(server: RunningServer, control: RunningServer) -> float:
    """What a token takes on one server while all the stalled readers are there, of what it takes on another that is
    asked the same in the same moments: the median, so that what a busy machine does to one answer does not count."""
    ratios: list[float] = []
    while len(ratios) < MAX_PAIRS:
        order = (server, control) if len(ratios) % 2 else (control, server)
        seconds = {one: one.post(TEXT, ANSWER).seconds for one in order}
        if num_parked(server) < NUM_STALLED:
            break
        ratios.append(seconds[server] / seconds[control])
    assert len(ratios) >= MIN_PAIRS, "they were cut off before enough was measured"
    return statistics.median(ratios)


@pytest.mark.skipif(not FULL, reason="takes a minute: MILLRACE_FULL=1")
def test_100_stalled_readers_delay_no_one_else_and_are_cut_off_with_all_they_held():
    """While they are there, a token takes those who read as long as on a server without them; 30 s later all is free,
    and what lay in their buffers has been little."""
    with RunningServer(**PATIENT) as server, RunningServer(**PATIENT) as control:
        with watched(server, **LIMITS):
            stalled = [stall(server, i) for i in range(NUM_STALLED)]
            try:
                deadline = time.monotonic() + 120
                while num_parked(server) < NUM_STALLED:
                    assert time.monotonic() < deadline, f"{num_parked(server)} of {NUM_STALLED} are parked"
                    time.sleep(0.2)
                ratio = step_ratio(server, control)
                print(f"a token beside {NUM_STALLED} stalled readers takes {ratio:.3f} of one without them")
                assert 0.9 <= ratio <= 1.1
                while server.errors().count("stalled_reader") < NUM_STALLED:
                    assert time.monotonic() < deadline, "stalled readers are still there"
                    time.sleep(0.2)
                server.wait_until_idle(10.0)
            finally:
                for connection in stalled:
                    connection.close()


NUM_IN_A_ROUND, ROUNDS = 25, 3
MAX_KEPT_OBJECTS = 100  # of a reader; its unread tokens are thousands


@pytest.mark.skipif(not FULL, reason="takes a minute: MILLRACE_FULL=1")
def test_readers_that_stalled_leave_no_more_objects_each_time():
    """Without a prefix cache, which keeps something of every prompt and answer, up to its size."""
    options = PATIENT | {"server": {"stalled_reader_s": 3.0}}
    options |= {"engine": PATIENT["engine"] | {"enable_prefix_caching": False}}
    with RunningServer(**options) as server:
        kept = [objects_after_a_round(server) for _ in range(ROUNDS)]
    print(f"objects after each round of {NUM_IN_A_ROUND} stalled readers: {kept}")
    assert kept[-1] <= kept[0] + MAX_KEPT_OBJECTS * NUM_IN_A_ROUND


def objects_after_a_round(server: RunningServer) -> int:
    """How many blocks of memory Python has given out, when all stalled readers of a round are gone."""
    stalled = [stall(server, i) for i in range(NUM_IN_A_ROUND)]
    while not server.stats()["live"]:
        time.sleep(0.1)
    time.sleep(1.0)
    server.wait_until_idle(60.0)
    for connection in stalled:
        connection.close()
    time.sleep(0.5)
    server.ask("collect")
    return int(server.stats()["allocated_blocks"])
