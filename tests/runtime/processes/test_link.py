"""Links: channels to another process keep a channel's promises, and foreign frames end the link."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from millrace.runtime.channel import ChannelClosed
from millrace.runtime.processes.frames import (
    FRAME,
    HELLO,
    MAGIC,
    MAX_HELLO_BYTES,
    PING,
    PONG,
    WORD,
    LinkError,
    pack_frame,
)
from millrace.runtime.processes.link import Link
from millrace.runtime.processes.link_channels import InboundChannel, OutboundChannel
from millrace.runtime.processes.transport import SocketTransport
from millrace.runtime.processes.wire import Buffer, Codec, WireError


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    number: int
    data: Any = None


CODEC = Codec([Parcel])


class Pair:
    """Two ends in one process: `out` reaches from here to `into` over there, `back` the other way."""

    def __init__(self, capacity: int = 2) -> None:
        self.socks = socket.socketpair()
        self.words: tuple[list[Any], list[Any]] = ([], [])
        self.lost: tuple[list[LinkError | None], list[LinkError | None]] = ([], [])
        self.here, self.there = (
            Link(SocketTransport(sock), CODEC, words.append, lost.append)
            for sock, words, lost in zip(self.socks, self.words, self.lost, strict=True)
        )
        self.out: OutboundChannel[Parcel] = OutboundChannel("out", capacity)
        self.into: InboundChannel[Parcel] = InboundChannel("out", capacity)
        self.here.add_outbound(self.out)
        self.there.add_inbound(self.into)

    def start(self) -> None:
        self.here.start()
        self.there.start()


def run(test: Callable[[Pair], Awaitable[None]], capacity: int = 2) -> None:
    async def main() -> None:
        pair = Pair(capacity)
        pair.start()
        await settle()
        try:
            await test(pair)
        finally:
            pair.here.close()
            pair.there.close()

    asyncio.run(asyncio.wait_for(main(), 20.0))


async def settle() -> None:
    """Lets everything ready cross, both ways: both ends are in one process, so turns of the loop are enough."""
    for _ in range(12):
        await asyncio.sleep(0)


def test_items_and_words_arrive_in_the_order_in_which_they_were_sent() -> None:
    async def test(pair: Pair) -> None:
        rng, got = random.Random(3), []
        for number in range(500):
            data = np.arange(rng.randrange(4000), dtype=np.int32)
            await pair.out.send(Parcel(number, data))
            got += pair.into.recv_all()
            if number % 50 == 0:
                await settle()
                got += pair.into.recv_all()
                await settle()
        await settle()
        got += pair.into.recv_all()
        assert [parcel.number for parcel in got] == list(range(500))
        assert all((parcel.data == np.arange(len(parcel.data))).all() for parcel in got)

    run(test, capacity=100)


def test_a_sender_waits_until_what_it_sent_was_received_over_there() -> None:
    async def test(pair: Pair) -> None:
        assert [pair.out.try_send(Parcel(number)) for number in range(3)] == [True, True, False]
        waiting = asyncio.ensure_future(pair.out.send(Parcel(2)))
        await settle()
        assert len(pair.into) == 2 and not waiting.done() and len(pair.out) == 2, "there is no room, here or there"
        assert [parcel.number for parcel in pair.into.recv_all()] == [0, 1]
        await settle()
        assert waiting.done() and [parcel.number for parcel in pair.into.recv_all()] == [2]
        await settle()
        assert len(pair.out) == 0 and pair.out.stats().num_sent == 3 and pair.out.stats().high_water == 2

    run(test)


def test_waiting_senders_get_room_in_order_and_a_cancelled_one_passes_it_on() -> None:
    async def test(pair: Pair) -> None:
        for number in (0, 1):
            await pair.out.send(Parcel(number))
        senders = [asyncio.ensure_future(pair.out.send(Parcel(number))) for number in (2, 3, 4)]
        await settle()
        senders[0].cancel()
        await settle()
        pair.into.recv_all()
        await settle()
        assert [parcel.number for parcel in pair.into.recv_all()] == [3, 4]

    run(test)


def test_many_messages_of_one_turn_leave_in_one_call() -> None:
    async def test(pair: Pair) -> None:
        before = pair.here.num_sends
        for number in range(64):
            pair.out.try_send(Parcel(number, np.zeros(64)))
            pair.here.post(Parcel(-number))
        await settle()
        assert len(pair.into) == 64 and len(pair.words[1]) == 64
        assert pair.here.num_sends == before + 1

    run(test, capacity=64)


def test_what_the_system_has_no_room_for_follows_whole_and_in_order() -> None:
    async def test(pair: Pair) -> None:
        data = np.random.default_rng(0).integers(0, 255, 3 << 20).astype(np.uint8)
        for number in range(4):
            await pair.out.send(Parcel(number, data))
        got: list[Parcel] = []
        while len(got) < 4:
            await asyncio.sleep(0)
            got += pair.into.recv_all()
        assert [parcel.number for parcel in got] == [0, 1, 2, 3]
        assert all((parcel.data == data).all() for parcel in got)

    run(test, capacity=4)


def test_a_closed_channel_delivers_what_it_holds_and_then_ends_over_there() -> None:
    async def test(pair: Pair) -> None:
        await pair.out.send(Parcel(7))
        pair.out.close()
        with pytest.raises(ChannelClosed):
            await pair.out.send(Parcel(8))
        assert [parcel.number async for parcel in pair.into] == [7]

    run(test)


def test_an_end_that_goes_is_noticed_and_what_had_arrived_can_still_be_received() -> None:
    async def test(pair: Pair) -> None:
        await pair.out.send(Parcel(1))
        await settle()
        pair.here.close()
        await settle()
        assert pair.lost == ([], [None]) and not pair.there.is_open
        assert [parcel.number for parcel in pair.into.recv_all()] == [1]

    run(test)


def test_the_last_words_of_an_end_arrive_though_the_other_one_sends_when_it_goes() -> None:
    async def test(pair: Pair) -> None:
        pair.there.post(Parcel(7))
        pair.there.close()
        pair.here.post(Parcel(1))
        pair.here._flush()  # before it reads: it meets a closed socket
        assert [word.number for word in pair.words[0]] == [7] and pair.lost[0] == [None]

    run(test)


def test_a_channel_outlives_its_link_and_keeps_what_is_sent_meanwhile_for_the_next() -> None:
    async def test(pair: Pair) -> None:
        for number in (0, 1):
            await pair.out.send(Parcel(number))
        waiting = asyncio.ensure_future(pair.out.send(Parcel(2)))
        await settle()
        pair.there.close()
        await settle()
        assert pair.lost[0] == [None] and waiting.done(), "what the link carried is forgotten, so there is room"
        await pair.out.send(Parcel(3))
        assert len(pair.out) == 2 and not pair.out.try_send(Parcel(4)), "and it is bounded as ever"

        socks = socket.socketpair()
        again: InboundChannel[Parcel] = InboundChannel("out", 2)
        here, there = (Link(SocketTransport(sock), CODEC, list().append, list().append) for sock in socks)
        here.add_outbound(pair.out)
        there.add_inbound(again)
        here.start()
        there.start()
        await settle()
        assert [parcel.number for parcel in again.recv_all()] == [2, 3]
        here.close()
        there.close()

    run(test)


def test_an_item_that_cannot_be_encoded_is_handed_back_and_takes_no_room() -> None:
    async def main() -> None:
        refused: list[Any] = []
        pair = Pair()
        pair.out._on_refused = lambda item, error: refused.append((item.number, str(error)))
        pair.start()
        await pair.out.send(Parcel(1, object()))
        assert len(pair.out) == 1 and refused == [], "it waits for the hello of the other end"
        await settle()
        await pair.out.send(Parcel(2, object()))
        text = "type object cannot be encoded: it is not in the list that both ends share"
        assert refused == [(1, text), (2, text)]
        assert len(pair.out) == 0
        pair.here.close()
        pair.there.close()

    asyncio.run(main())


FOREIGN = {
    "a frame begins with": b"GET / HTTP/1.1\r\n\r\n",
    "at most": FRAME.pack(MAGIC, WORD, 0, 1 << 30, 0, 0),
    "for edge 9": FRAME.pack(MAGIC, 3, 9, 0, 0, 0),
    "of unknown kind 1,": FRAME.pack(MAGIC, HELLO, 0, 8, 0, 0) + b"{}      ",
    "ping that was not sent": FRAME.pack(MAGIC, PONG, 0, 16, 0, 0) + bytes(16),
    "of unknown kind 77": FRAME.pack(MAGIC, 77, 0, 0, 0, 0),
    "not a message": FRAME.pack(MAGIC, WORD, 0, 8, 0, 0) + b"\x80\x04\x95nopi.",
    "without a credit": b"".join(FRAME.pack(MAGIC, 3, 0, 8, 0, 0) + b"[16,1,1]" for _ in range(3)),
    "credits for 0 items": None,
    "in the middle of a frame": FRAME.pack(MAGIC, WORD, 0, 100, 0, 0) + b"[",
}


@pytest.mark.security
@pytest.mark.parametrize("complaint", FOREIGN)
def test_what_is_foreign_or_torn_ends_the_link_and_says_what_it_was(complaint: str) -> None:
    async def test(pair: Pair) -> None:
        raw = FOREIGN[complaint]
        if raw is None:  # credits go the other way
            pair.socks[1].send(FRAME.pack(MAGIC, 4, 0, 0, 0, 5))
            lost = pair.lost[0]
        else:
            pair.socks[0].send(raw)
            if complaint == "in the middle of a frame":
                pair.here.close()
            lost = pair.lost[1]
        await settle()
        assert len(lost) == 1 and complaint in str(lost[0])

    run(test)


@pytest.mark.security
def test_random_bytes_never_make_a_message(tmp_path: Any) -> None:
    rng = random.Random(11)

    async def main() -> None:
        for _ in range(200):
            pair = Pair()
            pair.start()
            await settle()
            pair.socks[0].send(rng.randbytes(rng.randrange(16, 200)))
            await settle()
            assert pair.lost[1] and pair.words[1] == [] and not len(pair.into)
            pair.here.close()

    asyncio.run(main())


def test_ends_of_two_versions_or_with_other_edges_do_not_meet() -> None:
    async def main() -> None:
        pair = Pair()
        pair.there._inbound[0].capacity = 3
        pair.start()
        await settle()
        assert "both ends must have the same version" in str(pair.lost[1][0])
        assert not pair.there.is_open
        pair.here.close()

    asyncio.run(main())


@pytest.mark.security
@pytest.mark.parametrize(
    ("first", "complaint"),
    [
        (pack_frame(WORD, 0, b"[16,1,1]"), "of kind 2 before the hello"),
        (pack_frame(HELLO, 0, b"{}"), "both ends must have the same version"),
        (pack_frame(HELLO, 0, b"[[[]"), "a hello that is not JSON"),
        (pack_frame(HELLO, 0, b"[1]"), "both ends must have the same version"),
        ([FRAME.pack(MAGIC, HELLO, 0, MAX_HELLO_BYTES, 8, 0)], "at most 262144"),
    ],
)
def test_another_first_frame_than_a_hello_ends_the_link(first: list[Buffer], complaint: str) -> None:
    async def main() -> None:
        pair = Pair()
        pair.there.start()
        pair.socks[0].send(b"".join(first))
        await settle()
        assert len(pair.lost[1]) == 1 and complaint in str(pair.lost[1][0])
        pair.socks[0].close()

    asyncio.run(main())


def test_words_and_items_wait_for_the_hello_and_keep_their_order() -> None:
    async def main() -> None:
        pair = Pair(capacity=8)
        order: list[int] = []
        pair.into._on_arrival = lambda parcel: order.append(parcel.number)
        pair.there._on_word = lambda word: order.append(word.number)
        pair.here.start()
        for number in range(0, 6, 2):
            pair.here.post(Parcel(number))
            await pair.out.send(Parcel(number + 1))
        pair.out.close()
        await settle()
        assert order == [] and len(pair.out) == 3
        pair.there.start()
        await settle()
        assert order == [0, 1, 2, 3, 4, 5] and pair.into.is_closed
        pair.here.close()

    asyncio.run(main())


def test_a_word_that_cannot_be_sent_to_the_other_end_ends_the_link_before_its_hello() -> None:
    async def main() -> None:
        pair = Pair()
        pair.here.start()
        pair.here.post(Parcel(1, object()))
        pair.there.start()
        await settle()
        assert len(pair.lost[0]) == 1 and "type object cannot be encoded" in str(pair.lost[0][0])

    asyncio.run(main())


def test_a_word_that_its_receiver_cannot_answer_is_not_the_senders_fault() -> None:
    async def test(pair: Pair) -> None:
        errors = list[Any]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
        pair.there._on_word = lambda word: pair.there.post(object())
        pair.here.post(Parcel(1))
        await settle()
        assert [type(error) for error in errors] == [WireError]
        assert pair.there.is_open and pair.lost == ([], [])

    run(test)


def test_an_error_of_the_system_is_named_when_the_link_is_lost() -> None:
    class Unreachable(socket.socket):
        def recv(self, *_: Any) -> bytes:
            raise OSError(errno.EHOSTUNREACH, "No route to host")

    async def test(pair: Pair) -> None:
        pair.there._transport._sock = Unreachable(fileno=os.dup(pair.socks[1].fileno()))  # type: ignore[attr-defined]
        pair.there._on_readable()
        assert str(pair.lost[1][0]) == "the connection failed: No route to host"

    run(test)


@pytest.mark.security
@pytest.mark.parametrize("name", ["version", "types", "clock_s"])
def test_a_hello_that_is_nested_deeply_ends_the_link_with_an_error(name: str) -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        lost = list[Any]()
        link = Link(SocketTransport(near), CODEC, print, lost.append, timeout_s=5.0)
        link.start()
        hello = orjson.dumps({**Link._introduction([], []), "types": [], "clock_s": 0.0} | {name: "here"})
        deep = hello.replace(b'"here"', b"[" * 1000 + b"]" * 1000)
        far.send(b"".join(pack_frame(HELLO, header=deep)))
        await settle()
        assert len(lost) == 1 and isinstance(lost[0], LinkError) and not link.is_open
        far.close()

    asyncio.run(main())


@pytest.mark.security
def test_pings_without_end_of_a_peer_that_reads_nothing_cost_one_answer() -> None:
    async def test(pair: Pair) -> None:
        pair.here.close()
        near, far = socket.socketpair()
        link = Link(SocketTransport(near), CODEC, print, print)
        link.start()
        far.setblocking(False)
        far.send(b"".join(pack_frame(HELLO, header=orjson.dumps({**Link._introduction([], []), "types": []}))))
        await settle()
        link._unsent = memoryview(b"a part of a large frame, which the other end does not read")
        for _ in range(100):
            far.send(b"".join(pack_frame(PING, header=bytes(8))) * 50)
            await settle()
        assert link.is_open and sum(map(len, link._queued)) == 0 and len(link._frames) == 0
        link.close()
        far.close()

    run(test)


@pytest.mark.security
def test_a_pickle_in_a_frame_is_never_loaded(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    pickled = b"cposix\nsystem\n(S'touch %s'\ntR." % os.fsencode(canary)
    frames = [
        pack_frame(WORD, 0, pickled),
        pack_frame(WORD, 0, b"[16,1,[5,%d]]" % len(pickled), [pickled, bytes(-len(pickled) % 8)]),
    ]
    heard: list[Any] = []

    async def test(pair: Pair) -> None:
        pair.socks[0].send(b"".join(frames[1]))
        await settle()
        heard.extend(pair.words[1])
        pair.socks[0].send(b"".join(frames[0]))
        await settle()
        assert "not a message" in str(pair.lost[1][0])

    run(test)
    assert heard[0].data == pickled and not canary.exists()


def test_links_of_two_versions_exchange_what_both_know_and_refuse_the_rest_by_name() -> None:
    async def main() -> None:
        @dataclass(frozen=True)
        class Older:
            number: int

        @dataclass(frozen=True)
        class Extra:
            text: str = ""

        Older.__name__ = "Parcel"
        pair, refused = Pair(capacity=8), list[str]()
        pair.out._on_refused = lambda item, error: refused.append(f"{item.number}: {error}")
        pair.here._codec = Codec([Extra, Parcel])
        pair.there._codec = Codec([Older])
        pair.start()
        for number, data in enumerate((None, "new", None)):
            await pair.out.send(Parcel(number, data))  # the first ones wait for the hello
        await settle()
        await pair.out.send(Parcel(3, "new"))
        with pytest.raises(WireError, match="Extra cannot be sent: the other end's version does not know it"):
            pair.here.post(Extra())
        pair.there.post(Older(4))
        await settle()
        assert pair.into.recv_all() == [Older(0), Older(2)] and len(pair.out) == 2
        assert [(word.number, word.data) for word in pair.words[0]] == [(4, None)]
        text = "Parcel cannot be sent: the other end's version does not know its field data, which is set to a str"
        assert refused == [f"1: {text}", f"3: {text}"] and pair.here.is_open and pair.there.is_open
        pair.here.close()
        pair.there.close()

    asyncio.run(main())


def test_nothing_is_left_open() -> None:
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None

    async def test(pair: Pair) -> None:
        await pair.out.send(Parcel(1))

    run(test)
    if before is not None:
        assert set(os.listdir("/proc/self/fd")) == before
