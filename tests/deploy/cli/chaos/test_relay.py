"""Relays on loopback: what passes, late, in halves, not now, or never."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from millrace.deploy.cli.chaos.relay import Relay, Way

LIMIT_S = 60.0  # of a busy machine


class Watched:
    """What the relay told of all its connections."""

    def __init__(self) -> None:
        self.data: dict[Way, bytes] = {"up": b"", "down": b""}
        self.has_passed: dict[Way, asyncio.Event] = {"up": asyncio.Event(), "down": asyncio.Event()}
        self.num_closed = 0

    def passed(self, way: Way, data: bytes) -> None:
        self.data[way] += data
        self.has_passed[way].set()

    def closed(self) -> None:
        self.num_closed += 1


Story = Callable[[Relay, Watched, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def told(story: Story) -> Watched:
    """Runs a story between a client and a server that echoes, with a relay between them."""
    watched = Watched()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        relay = Relay(random.Random(1), lambda: watched)
        await relay.start()
        relay.target = server.sockets[0].getsockname()[:2]
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        try:
            async with asyncio.timeout(LIMIT_S):
                await story(relay, watched, reader, writer)
        finally:
            writer.close()
            await relay.aclose()
            server.close()
        assert not relay.num_connections

    asyncio.run(main())
    return watched


async def ended(reader: asyncio.StreamReader) -> bytes:
    """All that still comes."""
    data = b""
    try:
        while part := await reader.read(1 << 16):
            data += part
    except ConnectionResetError:
        pass
    return data


def test_all_bytes_pass_in_order_and_the_end_too():
    async def story(relay, watched, reader, writer):
        sent = random.Random(2).randbytes(1 << 20)
        writer.write(sent)
        writer.write_eof()
        assert await ended(reader) == sent
        assert watched.data == {"up": sent, "down": sent}

    assert told(story).num_closed == 1


def test_a_cut_link_is_reset_and_takes_no_connection_until_it_is_healed():
    async def story(relay, watched, reader, writer):
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        relay.is_cut = True
        relay.cut_now()
        assert await ended(reader) == b""
        again, other = await asyncio.open_connection("127.0.0.1", relay.port)
        assert await ended(again) == b""
        other.close()
        relay.is_cut = False
        again, other = await asyncio.open_connection("127.0.0.1", relay.port)
        other.write(b"b")
        assert await again.readexactly(1) == b"b"
        other.close()

    told(story)


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_stalled_link_holds_everything_and_loses_nothing(way: Way):
    async def story(relay, watched, reader, writer):
        relay.stalled = frozenset([way])
        writer.write(b"abc")
        await watched.has_passed["up"].wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.05)
        assert watched.data == {"up": b"abc", "down": b"" if way == "up" else b"abc"}
        relay.stalled = frozenset()
        relay.note_change()
        assert await reader.readexactly(3) == b"abc"

    told(story)


def test_a_halved_piece_is_the_last_one():
    async def story(relay, watched, reader, writer):
        relay.halves_next = True
        writer.write(b"abcdef")
        assert await ended(reader) in (b"", b"abc")  # the echo of the first half may still come
        assert watched.num_closed == 1 and not relay.halves_next

    told(story)


def test_a_delayed_link_keeps_the_order():
    async def story(relay, watched, reader, writer):
        relay.delay_s = (0.001, 0.02)
        for number in range(30):
            writer.write(bytes([number]))
            await asyncio.sleep(0.001)
        assert await reader.readexactly(30) == bytes(range(30))

    told(story)


def test_without_a_target_connections_are_closed_at_once():
    async def story(relay, watched, reader, writer):
        relay.target = None
        again, other = await asyncio.open_connection("127.0.0.1", relay.port)
        assert await ended(again) == b""
        other.close()

    told(story)
