"""The clock of streams under attack: greedy streams read by a process of its own, and how long each waits for its next
token.

Run as a script with a host and a port it reads until its stdin closes, then prints when each token came. Both ends read
one clock, that of the machine, so a test can say which tokens came while it attacked.
"""

from __future__ import annotations

import json
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import TracebackType

import numpy as np

from tests.deploy.running import ROOT, RunningServer, post_bytes
from tests.security.oracle import CANARIES, CONTEXT, TEXT

NUM_STREAMS = 8
BODY = {"prompt": CANARIES[0], "temperature": 0, "max_tokens": CONTEXT - 64, "ignore_eos": True, "stream": True}
MIN_GAPS = 100  # of a kind, or nothing is known of their 99th percentile

Span = tuple[float, float]


class CanaryReader:
    """Eight streams on a server, from its beginning to `stop`."""

    def __init__(self, server: RunningServer) -> None:
        host, port = server.address
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.security.gaps", host, str(port)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # all of them are under way

    def stop(self) -> list[list[float]]:
        """When the tokens of each answer came, in seconds of the machine's clock."""
        arrivals: list[list[float]] = json.loads(self._process.communicate()[0])
        return arrivals

    def __enter__(self) -> CanaryReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()


def gaps_within(arrivals: Sequence[Sequence[float]], spans: Sequence[Span]) -> np.ndarray:
    """Those between tokens that both came within one of the spans."""
    ends = np.array([(before, after) for answer in arrivals for before, after in pairwise(answer)])
    kept = [ends[(ends[:, 0] >= began) & (ends[:, 1] < ended)] for began, ended in spans]
    return np.concatenate([pairs[:, 1] - pairs[:, 0] for pairs in kept])


def p99_ratio(server: RunningServer, attack: Callable[[], object], rounds: int = 3, span_s: float = 0.3) -> float:
    """The canaries' 99th percentile gap while `attack` is called again and again, of that at rest. Attack and rest take
    turns, so that both have the same share of what else the machine does."""
    spans: dict[bool, list[Span]] = {True: [], False: []}
    with CanaryReader(server) as reader:
        for i in range(2 * rounds):
            is_attacked = bool(i % 2)
            began_s = time.monotonic()
            while time.monotonic() < began_s + span_s:
                if is_attacked:
                    attack()
                else:
                    time.sleep(span_s / 10)
            spans[is_attacked].append((began_s, time.monotonic()))
        arrivals = reader.stop()
    gaps = {kind: gaps_within(arrivals, spans[kind]) for kind in spans}
    assert min(map(len, gaps.values())) >= MIN_GAPS, "too few tokens came to tell"
    attacked, rest = (float(np.quantile(gaps[kind], 0.99)) for kind in (True, False))
    return attacked / rest


# -- the reading process


def read(host: str, port: int) -> None:
    """Keeps `NUM_STREAMS` streams under way and notes when each event comes."""
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    finished: list[list[float]] = []
    open_ones: dict[socket.socket, list[float]] = {}

    def begin() -> None:
        connection = socket.create_connection((host, port))
        connection.sendall(post_bytes(TEXT, BODY))
        selector.register(connection, selectors.EVENT_READ)
        open_ones[connection] = []

    for _ in range(NUM_STREAMS):
        begin()
    is_told = False
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                print(json.dumps([*finished, *open_ones.values()]))
                return
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            data = connection.recv(65536)
            now_s = time.monotonic()
            if not data:
                selector.unregister(connection)
                connection.close()
                finished.append(open_ones.pop(connection))
                begin()
            elif b'"text":' in data:
                open_ones[connection].append(now_s)
        if not is_told and all(open_ones.values()):
            is_told = True
            print("reading", flush=True)


if __name__ == "__main__":
    read(sys.argv[1], int(sys.argv[2]))
