"""What relays read and change of the frames between a front and an engine."""

from __future__ import annotations

import asyncio
import random
import socket
from typing import Any

import numpy as np
import orjson
import pytest

from millrace.deploy.cli.chaos.awake_clock import AwakeClock
from millrace.deploy.cli.chaos.link_watch import LinkHistory, SpanWatch
from millrace.deploy.cli.chaos.version_edits import HelloEdit, without_last_fields
from millrace.runtime.processes.auth import HANDSHAKE_BYTES
from millrace.runtime.processes.frames import HELLO, ITEM, WORD, pack_frame
from millrace.runtime.processes.link import Link
from millrace.runtime.processes.link_channels import InboundChannel, OutboundChannel
from millrace.runtime.processes.transport import READ_BYTES, SocketTransport
from millrace.runtime.processes.type_fields import describe
from millrace.stages.messages import TokenRequest
from millrace.stages.params import SamplingParams
from millrace.stages.split.protocol import CODEC, Draining, RequestFailed, RequestsEnded

PROOF = bytes(HANDSHAKE_BYTES)


def hello() -> bytes:
    return b"".join(pack_frame(HELLO, header=orjson.dumps({"types": describe(CODEC), "clock_s": 1.0})))


def packed(kind: int, message: Any) -> bytes:
    return b"".join(pack_frame(kind, 0, *CODEC.encode(message)))


def request(name: str) -> TokenRequest:
    return TokenRequest(name, 0, np.arange(9, dtype=np.int32), SamplingParams(max_tokens=9, seed=0), 0)


def test_a_watch_knows_which_request_is_where_from_bytes_in_any_pieces() -> None:
    history, draw = LinkHistory(), random.Random(3)
    watch = SpanWatch(history, AwakeClock(), "front0", "engine1")
    failed = packed(WORD, RequestFailed("b", "Failed", "no", "internal_error"))
    sent = [packed(ITEM, request(name)) for name in ("a", "b", "c", "warm-up-1")]
    up = PROOF + hello() + b"".join(sent) + packed(WORD, RequestsEnded(["a", "x"]))
    for way, data in (("up", up), ("down", PROOF + hello() + failed)):
        while data:
            size = draw.randint(1, 700)
            watch.passed(way, data[:size])  # type: ignore[arg-type]
            data = data[size:]
    watch.closed()
    (span,) = history.spans
    assert list(span.requests) == ["c"] and history.num_sent == 3 and span.closed_s is not None
    assert history.violations() == []
    other = SpanWatch(history, AwakeClock(), "front0", "engine0")
    other.passed("up", PROOF + b"no frame at all, but 16 bytes or more")
    other.passed("down", PROOF[:-1])
    assert history.violations() == [] and history.spans == [span], "a stranger: the engine has not proven its key"
    other.passed("down", PROOF[-1:])
    assert "link front0-engine0: up: a frame begins with" in history.violations()[0]
    other.passed("down", b"no frame either, and 16 bytes or more")
    assert [one.split(": ")[1] for one in history.violations()] == ["up", "down"]


def fields_of(data: bytes) -> dict[str, list[str]]:
    return {one[0]: one[1] for one in orjson.loads(data)["types"]}


def test_a_hello_lacks_the_last_field_of_each_type_that_can_do_without() -> None:
    before = orjson.dumps({"types": describe(CODEC), "version": 2})
    full, short = fields_of(before), fields_of(without_last_fields(before))
    assert orjson.loads(without_last_fields(before))["version"] == 2
    assert short["TokenRequest"] == full["TokenRequest"][:-1] and short["Draining"] == full["Draining"][:-1]
    assert short["Setup"] == full["Setup"] and short["RequestsEnded"] == full["RequestsEnded"]
    assert sum(short[name] != full[name] for name in full) > 5


@pytest.mark.parametrize("seed", range(5))
def test_an_edit_changes_the_first_frame_alone_in_whatever_pieces_it_comes(seed: int) -> None:
    draw, edit = random.Random(seed), HelloEdit()
    behind, passed = packed(WORD, Draining()) * 3, b""
    data = PROOF + hello() + behind
    while data:
        size = draw.randint(1, 4000)
        passed += edit(data[:size])
        data = data[size:]
    assert passed.startswith(PROOF) and passed.endswith(behind)
    whole = HelloEdit()(PROOF + hello() + behind)
    assert passed == whole and len(whole) < len(PROOF + hello() + behind)


def test_two_ends_talk_over_a_link_whose_hellos_lack_fields() -> None:
    """As between adjacent versions: what the other end does not know is left out, and the rest arrives."""

    async def main() -> list[Any]:
        words: list[Any] = []
        came = asyncio.Event()

        def receive(word: Any) -> None:
            words.append(word)
            came.set()

        front, near = socket.socketpair()
        far, engine = socket.socketpair()
        requests: InboundChannel[TokenRequest] = InboundChannel("requests", 4)
        to_engine: OutboundChannel[TokenRequest] = OutboundChannel("requests", 4)
        one = Link(SocketTransport(front), CODEC, receive, words.append)
        other = Link(SocketTransport(engine), CODEC, words.append, words.append, only_reports=True)
        one.add_outbound(to_engine)
        other.add_inbound(requests)
        loop = asyncio.get_running_loop()
        edits = {near: (far, HelloEdit()), far: (near, HelloEdit())}
        begun = {near: PROOF, far: PROOF}  # no proof of a key here
        near.setblocking(False)
        far.setblocking(False)

        def relay(source: socket.socket) -> None:
            sink, edit = edits[source]
            data, begun[source] = begun[source] + source.recv(READ_BYTES), b""
            sink.send(edit(data).removeprefix(PROOF))

        for source in edits:
            loop.add_reader(source, relay, source)
        one.start()
        other.start()
        await to_engine.send(request("a"))
        other.post(Draining(migrates=True))
        async with asyncio.timeout(20.0):
            words.append(await anext(aiter(requests)))
            await came.wait()
        for source in edits:
            loop.remove_reader(source)
            source.close()
        one.close()
        other.close()
        return words

    words = asyncio.run(main())
    (asked,) = [one for one in words if isinstance(one, TokenRequest)]
    (said,) = [one for one in words if isinstance(one, Draining)]
    assert asked.request_id == "a" and asked.metadata == {} and not said.migrates
