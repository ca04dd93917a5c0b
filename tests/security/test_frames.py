"""Frames that are too long, too many, compressed, or no frames at all."""

from __future__ import annotations

import struct
import threading
import zlib

import pytest

from tests.deploy.running import RunningServer
from tests.security.frames import BINARY, CLOSE, CONTINUATION, PING, PONG, TEXT, frame, memory_mib, say, upgraded
from tests.security.oracle import ATTEMPTS, LAG_MS

MIB = 2**20
CREATE = {"type": "create", "id": "a", "endpoint": "completions", "body": {"prompt": "a", "max_tokens": 2}}
BOMB = zlib.compress(bytes(64 * MIB), 9)[2:-4]
HALF = [frame(TEXT, b"{", is_last=False)]
GROWTH_MIB = 32

CASES = {
    "an incomplete frame of 64 MiB": ([frame(TEXT, b"x" * 100_000, length=64 * MIB)], 1009),
    "a frame of 2^63 - 1 bytes": ([frame(TEXT, length=2**63 - 1)], 1009),
    "a frame of 2^64 - 1 bytes": ([frame(BINARY, length=2**64 - 1)], 1009),
    "one byte over the limit": ([frame(TEXT, length=4 * MIB + 1)], 1009),
    "5 MiB in fragments of 1 MiB": ([*HALF, *[frame(CONTINUATION, bytes(MIB), is_last=False)] * 5], 1009),
    "100,000 fragments": ([*HALF, *[frame(CONTINUATION, b"x", is_last=False)] * 100_000], 1009),
    "100,000 empty fragments": ([*HALF, *[frame(CONTINUATION, is_last=False)] * 100_000], 1009),
    "a compressed bomb": ([frame(TEXT, BOMB, rsv=4)], 1002),
    "RSV1, which was not negotiated": ([frame(TEXT, b"{}", rsv=4)], 1002),
    "RSV2": ([frame(TEXT, b"{}", rsv=2)], 1002),
    "RSV3 on a ping": ([frame(PING, rsv=1)], 1002),
    "bad UTF-8": ([frame(TEXT, b'{"type":"\xff\xfe"}')], 1007),
    "bad UTF-8 over two fragments": ([frame(TEXT, b'{"\xc3', is_last=False), frame(CONTINUATION, b'("}')], 1007),
    "a surrogate": ([frame(TEXT, b'{"type":"\xed\xa0\x80"}')], 1007),
    "10,000 pings": ([frame(PING, b"x" * 125)] * 10_000, 1008),
    "10,000 pongs": ([frame(PONG)] * 10_000, 1008),
    "a ping of 126 bytes": ([frame(PING, b"x" * 126)], 1002),
    "a ping in fragments": ([frame(PING, is_last=False)], 1002),
    "a frame without a mask": ([frame(TEXT, b"{}", is_masked=False)], 1002),
    "a ping without a mask": ([frame(PING, is_masked=False)], 1002),
    "an unknown opcode": ([frame(3)], 1002),
    "an unknown control opcode": ([frame(11)], 1002),
    "a continuation of nothing": ([frame(CONTINUATION, b"x")], 1002),
    "a message inside another": ([*HALF, frame(TEXT, b"{}")], 1002),
    "a message inside an empty one": ([frame(TEXT, is_last=False), frame(TEXT, b"{}")], 1002),
    "binary": ([frame(BINARY, b"{}")], 1003),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_told_and_closed_and_costs_no_memory(server: RunningServer, name: str):
    frames, code = CASES[name]
    data = b"".join(frames)
    before = memory_mib(server)
    for _ in range(2):
        with upgraded(server) as raw:
            raw.send(say(CREATE))
            raw.send(data)
            told = raw.listen()
            assert told.close_code == code, told
            assert told.error["code"]
    assert memory_mib(server) - before <= GROWTH_MIB


def test_what_is_within_the_bounds_is_served(server: RunningServer):
    text = say(CREATE)[6:]
    text = text[text.index(b"{") :]
    pieces = [frame(TEXT if i == 0 else CONTINUATION, text[i : i + 1], is_last=False) for i in range(len(text))]
    ping = frame(PING, b"still there?")
    long = say(CREATE | {"padding": "x" * (4 * MIB - 300)})
    for frames in (
        [say(CREATE)],
        [*pieces, frame(CONTINUATION)],
        [piece + ping for piece in pieces[:50]] + pieces[50:],
    ):
        with upgraded(server) as raw:
            closing = [] if frames[-1] == frame(CONTINUATION) or len(frames) == 1 else [frame(CONTINUATION)]
            raw.send(b"".join(frames + closing))
            while not any(message["type"] == "done" for message in raw.listen(0.05).messages):
                assert raw.told.close_code is None, raw.told
    with upgraded(server) as raw:
        raw.send(long)
        while not any(message["type"] == "done" for message in raw.listen(0.05).messages):
            assert raw.told.close_code is None, raw.told


@pytest.mark.parametrize("message", [{"type": "credit", "id": "a"}, {"type": "made-up", "id": "a"}])
def test_a_flood_of_small_messages_leaves_the_others_their_turns(server: RunningServer, message: dict[str, str]):
    """The lag in one of a few tries: another process may have the core for a moment."""
    lags_ms = []
    for _ in range(ATTEMPTS):
        server.stats()
        with upgraded(server) as raw:
            reading = threading.Thread(target=raw.listen)
            reading.start()
            raw.send(say(message) * 2_000 + frame(TEXT, b"\xff"))
            reading.join()
        assert raw.told.close_code == 1007
        lags_ms.append(server.stats()["lag_ms"])
        if lags_ms[-1] <= LAG_MS:
            return
    raise AssertionError(f"lags in ms: {lags_ms}")


def test_no_extension_is_negotiated(server: RunningServer):
    from tests.deploy.running import head_bytes
    from tests.security.frames import UPGRADE

    with server.connect() as connection:
        offer = {"Sec-WebSocket-Extensions": "permessage-deflate; client_max_window_bits"}
        connection.sendall(head_bytes("GET", "/v1/stream", UPGRADE | offer))
        head = connection.recv(4096)
    assert head.startswith(b"HTTP/1.1 101 ") and b"extensions" not in head.lower()


@pytest.mark.parametrize(
    ("sent", "answered"),
    [(1000, 1000), (3999, 3999), (4999, 4999), (1005, 1002), (1015, 1002), (5000, 1002), (51578, 1002)],
)
def test_a_close_code_is_sent_back_if_it_may_be_sent_at_all(server: RunningServer, sent: int, answered: int):
    with upgraded(server) as raw:
        raw.send(frame(CLOSE, struct.pack("!H", sent)))
        assert raw.listen().close_code == answered
