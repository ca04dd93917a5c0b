"""Corrupted HTTP on raw sockets.

    python -m tests.generators.http_mutator --cases 20000 [--seed N]

Begins with what the tests in `tests/security` send. Whatever comes back is whole responses in our shape, none of them a
500 and none with anything inner in it, and a good request is answered after each hundred.
"""

from __future__ import annotations

import argparse
import random
import re
import socket
from collections.abc import Callable

from tests.deploy.running import Answer, RunningServer, head_bytes, post_bytes, send
from tests.security.oracle import CHAT, TEXT, check_no_leak
from tests.security.test_smuggling import REFUSED, request

GOOD = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
CHUNKED = head_bytes("POST", TEXT, {"Content-Type": "application/json", "Transfer-Encoding": "chunked"})
HANDSHAKE = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}
SEEDS: list[bytes] = [
    *REFUSED.values(),
    request(),
    post_bytes(TEXT, GOOD),
    post_bytes(TEXT, GOOD | {"stream": True, "n": 2}),
    post_bytes(CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}, {"Connection": "keep-alive"}),
    CHUNKED + b'5\r\n{"pro\r\n20;x=y\r\nmpt": "a", "max_tokens": 1}      \r\n0\r\nTrailer: x\r\n\r\n',
    head_bytes("GET", "/health", {}) * 3 + head_bytes("GET", "/metrics", {"Connection": "close"}),
    head_bytes("DELETE", "/v1/requests/a", {}),
    head_bytes("OPTIONS", TEXT, {"Origin": "http://a", "Access-Control-Request-Method": "POST"}),
    head_bytes("POST", TEXT, {"Expect": "100-continue", "Content-Length": "2", "Content-Type": "application/json"})
    + b"{}",
    head_bytes("GET", "/v1/stream", HANDSHAKE),
    head_bytes("GET", "/health", {"X-Long": "x" * 9000}),
    head_bytes("POST", TEXT, {"Content-Encoding": "gzip", "Content-Length": "4", "Content-Type": "application/json"})
    + b"\x1f\x8b\x08\x00",
]
PIECES = [
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b",", b";", b"\xff", b"\x1b[0m", b"\xc3\xa9", b"%00", b".."),
    *(b"Transfer-Encoding: chunked\r\n", b"Content-Length: 0\r\n", b"Content-Length: 99999999999\r\n", b"Host: a\r\n"),
    *(b"HTTP/1.0", b"HTTP/9.9", b"HTTP/2.0", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02", b"0\r\n\r\n"),
    *(b"\r\n\r\n", b"FFFFFFFFF\r\n", b"Connection: close, keep-alive\r\n", b"Upgrade: h2c\r\n", b"Expect: x\r\n"),
    *(b'{"a":' * 40, b"A" * 20_000),
]  # fmt: skip
STATUSES = {100, 101, 200, 204, 400, 401, 403, 404, 405, 408, 413, 415, 417, 426, 429, 431, 501, 503, 505}

Mutation = Callable[[random.Random, bytes], bytes]


def flip(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


def insert(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.choice(PIECES) + data[at:]


def insert_line(draw: random.Random, data: bytes) -> bytes:
    ends = [match.end() for match in re.finditer(rb"\r\n", data)] or [0]
    at = draw.choice(ends)
    return data[:at] + draw.choice(PIECES) + data[at:]


def delete(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + data[at + draw.randint(1, 8) :]


def repeat(draw: random.Random, data: bytes) -> bytes:
    start = draw.randrange(len(data))
    part = data[start : start + draw.randint(1, 60)]
    return data[:start] + part * draw.randint(2, 20) + data[start:]


def splice(draw: random.Random, data: bytes) -> bytes:
    other = draw.choice(SEEDS)
    return data[: draw.randrange(len(data) + 1)] + other[draw.randrange(len(other)) :]


def number(draw: random.Random, data: bytes) -> bytes:
    numbers = list(re.finditer(rb"\d+", data))
    if not numbers:
        return data
    match = draw.choice(numbers)
    new = draw.choice([b"0", b"-1", b"+5", b"0x10", b"1e3", b"9" * 30, b"4294967296", b" 7", b"", b"00", "٣".encode()])
    return data[: match.start()] + new + data[match.end() :]


MUTATIONS: list[Mutation] = [flip, insert, insert_line, delete, repeat, splice, number]


def mutate(draw: random.Random) -> bytes:
    """A seed with one to four things done to it."""
    data = draw.choice(SEEDS)
    for _ in range(draw.randint(1, 4)):
        data = draw.choice(MUTATIONS)(draw, data) or b"\r\n"
    return data


def tell(server: RunningServer, data: bytes) -> bytes:
    """Sends it and that there is no more, and reads to the end."""
    parts = []
    with server.connect(10.0) as connection:
        send(connection, data)
        try:
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                parts.append(part)
        except (ConnectionResetError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise AssertionError("the server neither answers nor closes") from None
    return b"".join(parts)


def check(told: bytes) -> None:
    """What came back is HTTP, and says nothing of what is inside."""
    assert not told or told.startswith(b"HTTP/1."), told[:100]
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", told)]
    assert set(statuses) <= STATUSES, statuses
    if b"/metrics" not in told and b"# HELP" not in told:
        check_no_leak(Answer(0, {}, told, 0.0))


def run(server: RunningServer, cases: int, seed: int) -> None:
    """Raises AssertionError for the first that is not answered as it should be, with its seed and bytes."""
    for case in range(cases):
        data = mutate(random.Random(seed * 1_000_003 + case))
        try:
            check(tell(server, data))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, case {case}, {data[:2000]!r}: {error}") from error
        if case % 100 == 99:
            assert server.post(TEXT, GOOD).status == 200
            server.stats()
    server.wait_until_idle(10.0)
    assert server.post(TEXT, GOOD).status == 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with RunningServer(server={"log_format": "json"}) as server:
        run(server, options.cases, options.seed)
        assert "unhandled error" not in server.errors() and "request.failed" not in server.errors(), server.errors()
    print(f"{options.cases} mutated requests: all answered or closed, the server well")


if __name__ == "__main__":
    main()
