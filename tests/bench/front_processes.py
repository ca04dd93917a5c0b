"""Requests a second of `--front-processes` over HTTP: one process, `--mode split`, and two fronts with an engine.

    python -m tests.bench.front_processes [--rounds 5] [--seconds 2] [--output results.json]

All servers are up at once and take turns, the ones that are not asked stopped (SIGSTOP), so drifts of the machine fall
on all. The load is 64 connections that stay open, each with one request at a time, from a process of its own:
`/health/live`, completions of 1 token, and streams of 16 tokens, of the bundled model. The clients need about a core
themselves. So on two cores this tells what more processes cost, and only on four or more what they bring.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import selectors
import signal
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.deploy.running import RunningServer, head_bytes

SERVERS: Mapping[str, Sequence[str]] = {
    "inline": (),
    "split": ("--mode", "split"),
    "fronts-2": ("--front-processes", "2"),
}
NUM_CONNECTIONS = 64
SETTINGS = ("--port", "0", "--max-num-seqs", "64", "--threads", "1", "--log-level", "warning", "--no-log-requests")


def post(body: Mapping[str, object]) -> bytes:
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(data))}
    return head_bytes("POST", "/v1/completions", headers) + data


PROMPT = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}
LOADS = {
    "health": head_bytes("GET", "/health/live", {}),
    "completion": post({**PROMPT, "max_tokens": 1}),
    "stream": post({**PROMPT, "max_tokens": 16, "stream": True}),
}


def answers_in(address: tuple[str, int], request: bytes, seconds: float) -> int:
    """How many answers come in so many seconds over `NUM_CONNECTIONS` connections. One without status 200 raises."""
    selector, num_answers = selectors.DefaultSelector(), 0
    for _ in range(NUM_CONNECTIONS):
        connection = socket.create_connection(address)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(request)
        selector.register(connection, selectors.EVENT_READ, bytearray())
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for key, _ in selector.select(0.1):
            connection, got = key.fileobj, key.data
            assert isinstance(connection, socket.socket)
            got += connection.recv(1 << 16)
            if not _is_whole(got):
                continue
            if not got.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"the server answered {bytes(got[:200])!r}")
            num_answers += 1
            got.clear()
            connection.sendall(request)
    for key in list(selector.get_map().values()):
        key.fileobj.close()  # type: ignore[union-attr]
    return num_answers


def _is_whole(got: bytearray) -> bool:
    head, has_head, body = got.partition(b"\r\n\r\n")
    if not has_head:
        return False
    if b"chunked" in head:
        return got.endswith(b"0\r\n\r\n")
    _, _, length = head.lower().partition(b"content-length: ")
    return len(body) >= int(length.split(b"\r\n")[0])


@contextmanager
def awake(server: RunningServer) -> Iterator[None]:
    """Continues a server, and stops it afterwards."""
    _signal(server, signal.SIGCONT)
    try:
        yield
    finally:
        _signal(server, signal.SIGSTOP)


def _signal(server: RunningServer, number: int) -> None:
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for each in [pid, *map(int, children)]:
        os.kill(each, number)


def start(name: str) -> RunningServer:
    """A server of `SERVERS`."""
    return RunningServer(command=[sys.executable, "-m", "millrace.deploy", "serve", *SETTINGS, *SERVERS[name]])


def rate(server: RunningServer, load: str, seconds: float) -> float:
    """Requests a second of one load, from another process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(answers_in, (server.address, LOADS[load], seconds)) / seconds


def measure(names: Sequence[str], loads: Sequence[str], rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Load -> server -> requests a second, medians over the rounds."""
    servers = {name: start(name) for name in names}
    found: dict[str, dict[str, list[float]]] = {load: {name: [] for name in names} for load in loads}
    try:
        for server in servers.values():
            _signal(server, signal.SIGSTOP)
        for number in range(rounds):
            for load in loads:
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    with awake(servers[name]):
                        found[load][name].append(rate(servers[name], load, seconds))
    finally:
        for server in servers.values():
            _signal(server, signal.SIGCONT)
            server.__exit__()
    return {
        load: {name: round(statistics.median(row), 1) for name, row in rows.items()} for load, rows in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = measure(tuple(SERVERS), tuple(LOADS), options.rounds, options.seconds)
    result = {"cores": len(os.sched_getaffinity(0)), "connections": NUM_CONNECTIONS, "requests_per_s": found}
    print(json.dumps(result, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
