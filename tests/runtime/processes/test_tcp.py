"""Links over TCP on loopback: only ends with the fleet's key meet, and strangers cost little."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from millrace.runtime.env.log import captured_logs
from millrace.runtime.processes import tcp
from millrace.runtime.processes.auth import AuthError, FleetKey
from millrace.runtime.processes.frames import HELLO, NoLink, pack_frame
from millrace.runtime.processes.link import Link
from millrace.runtime.processes.tcp import MAX_PENDING, RefusalLog, TcpListener, dial
from millrace.runtime.processes.transport import SocketTransport
from millrace.runtime.processes.wire import Codec

KEY, OTHER = FleetKey(bytes(range(32))), FleetKey(bytes(range(1, 33)))


@dataclass(frozen=True, slots=True)
class Note:
    text: str


CODEC = Codec([Note])


class Core:
    """A listener that answers each word of each link."""

    def __init__(self, key: FleetKey | None = KEY, handshake_s: float = 20.0) -> None:
        self.listener = TcpListener("127.0.0.1", 0, key, self._connected, handshake_s)
        self.links: list[Link] = []
        self.words: list[Any] = []
        self.lost: list[Any] = []
        self.has_heard = asyncio.Event()

    def _connected(self, transport: SocketTransport) -> None:
        link = Link(transport, CODEC, lambda word: self._answer(link, word), self.lost.append, timeout_s=10.0)
        self.links.append(link)
        link.start()

    def _answer(self, link: Link, word: Any) -> None:
        self.words.append(word)
        self.has_heard.set()
        link.post(Note(word.text + "!"))


def with_core(test: Callable[[Core], Awaitable[None]], **settings: Any) -> Core:
    async def main() -> Core:
        core = Core(**settings)
        await core.listener.start()
        try:
            await test(core)
        finally:
            await core.listener.aclose()
            for link in core.links:
                link.close()
        return core

    return asyncio.run(asyncio.wait_for(main(), 20.0))


async def ask(core: Core, key: FleetKey | None, text: str) -> str:
    """Dials, sends a word, and returns the answer."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    transport = await dial(*core.listener.address, key, timeout_s=20.0)
    link = Link(transport, CODEC, answer.set_result, answer.set_result, timeout_s=10.0)
    link.start()
    link.post(Note(text))
    found = await answer
    link.close()
    return found.text if isinstance(found, Note) else str(found)


async def refused(raw: socket.socket) -> bytes:
    """What a stranger gets until the connection ends."""
    got = b""
    try:
        while data := await asyncio.get_running_loop().sock_recv(raw, 4096):
            got += data
    except ConnectionResetError:
        pass
    raw.close()
    return got


async def stranger(core: Core) -> socket.socket:
    """A connection without a handshake. It does not block: the listener runs on the same loop."""
    raw = socket.socket()
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, core.listener.address)
    return raw


def test_ends_with_the_key_meet_and_talk() -> None:
    async def test(core: Core) -> None:
        assert await asyncio.gather(*(ask(core, KEY, f"{number}") for number in range(5))) == [
            f"{n}!" for n in range(5)
        ]

    assert with_core(test).listener.num_refused == 0


def test_on_loopback_no_key_is_needed() -> None:
    async def test(core: Core) -> None:
        assert await ask(core, None, "hello") == "hello!"

    with_core(test, key=None)


@pytest.mark.security
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
def test_beyond_loopback_a_key_is_needed(host: str) -> None:
    with pytest.raises(ValueError, match="needs a fleet key"):
        TcpListener(host, 0, None, print)
    TcpListener(host, 0, KEY, print)


@pytest.mark.security
def test_a_dialer_with_another_key_or_none_is_refused_and_tells_nothing_to_the_engine() -> None:
    async def test(core: Core) -> None:
        with pytest.raises(AuthError, match="closed the connection at the proof of the key, so it has another one"):
            await dial(*core.listener.address, OTHER)
        link_lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        link = Link(await dial(*core.listener.address, None), CODEC, print, link_lost.set_result)
        link.start()
        lost = await link_lost
        assert isinstance(lost, NoLink) and "perhaps it wants a key" in str(lost), "the listener's nonce is no frame"
        assert await ask(core, KEY, "still here") == "still here!"

    core = with_core(test)
    assert core.listener.num_refused == 2 and core.words == [Note("still here")]


@pytest.mark.security
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 9,
        b"\x80\x04\x95" + b"cos\nsystem\n(S'touch canary'\ntR." * 4,
        b"".join(pack_frame(HELLO, 0, b"{}")) * 4,
        bytes(10_000),
    ],
)
def test_a_stranger_gets_a_nonce_and_the_end(sent: bytes) -> None:
    async def test(core: Core) -> None:
        raw = await stranger(core)
        raw.sendall(sent)
        raw.shutdown(socket.SHUT_WR)
        assert len(await refused(raw)) <= 32

    core = with_core(test)
    assert core.listener.num_refused == 1 and not core.links


@pytest.mark.security
def test_a_slow_stranger_is_ended_in_time() -> None:
    async def test(core: Core) -> None:
        raw = await stranger(core)
        raw.send(b"x")
        assert len(await refused(raw)) <= 32

    assert with_core(test, handshake_s=0.1).listener.num_refused == 1


@pytest.mark.security
def test_more_pending_strangers_than_allowed_end_the_oldest_and_a_peer_gets_in() -> None:
    async def test(core: Core) -> None:
        strangers = [await stranger(core) for _ in range(MAX_PENDING + 3)]
        for raw in strangers[:3]:
            assert len(await refused(raw)) <= 32
        assert core.listener.num_refused == 3
        assert await ask(core, KEY, "in") == "in!"
        for raw in strangers[3:]:
            raw.close()

    with_core(test, handshake_s=60.0)


@pytest.mark.security
def test_a_recorded_handshake_played_again_is_refused() -> None:
    async def test(core: Core) -> None:
        loop, recorded = asyncio.get_running_loop(), bytearray()

        async def relay() -> None:
            near, _ = await loop.sock_accept(server)
            far = await stranger(core)

            async def copy(source: socket.socket, target: socket.socket, kept: bytearray | None) -> None:
                while data := await loop.sock_recv(source, 4096):
                    if kept is not None:
                        kept += data
                    await loop.sock_sendall(target, data)

            copies = [asyncio.ensure_future(part) for part in (copy(near, far, recorded), copy(far, near, None))]
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            for part in copies:
                part.cancel()
            await asyncio.wait(copies)
            near.close()
            far.close()

        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            relaying = asyncio.ensure_future(relay())
            link = Link(await dial(*server.getsockname(), KEY), CODEC, print, print)
            link.start()
            link.post(Note("once"))
            await core.has_heard.wait()
            link.close()
            await relaying
        raw = await stranger(core)
        raw.sendall(recorded)
        assert len(await refused(raw)) <= 32

    core = with_core(test)
    assert core.words == [Note("once")] and core.listener.num_refused == 1


@pytest.mark.security
def test_random_connections_leave_the_listener_as_it_was() -> None:
    draw = random.Random(8)

    async def test(core: Core) -> None:
        for _ in range(50):
            raw = await stranger(core)
            raw.sendall(draw.randbytes(draw.randrange(1, 300)))
            raw.close()
        assert await ask(core, KEY, "fine") == "fine!"

    core = with_core(test)
    assert core.words == [Note("fine")]


def test_an_accept_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "ACCEPT_PAUSE_S", 0.0)

    async def test(core: Core) -> None:
        loop = asyncio.get_running_loop()
        accept, failures = loop.sock_accept, [OSError(24, "Too many open files")] * 2

        async def failing(sock: socket.socket) -> Any:
            if failures:
                raise failures.pop()
            return await accept(sock)

        monkeypatch.setattr(loop, "sock_accept", failing)
        assert await ask(core, KEY, "one") == "one!"  # it was waiting to accept
        assert await ask(core, KEY, "two") == "two!" and not failures

    with_core(test)


@pytest.mark.security
def test_a_burst_of_strangers_never_exceeds_the_bound_and_logs_one_line() -> None:
    async def test(core: Core) -> None:
        pending, strangers = core.listener._pending, list[socket.socket]()
        most = 0
        for _ in range(3):
            for _ in range(MAX_PENDING + 1):  # in the backlog, before the listener's turn
                raw = socket.socket()
                raw.setblocking(False)
                raw.connect_ex(core.listener.address)
                strangers.append(raw)
            for _ in range(50):
                await asyncio.sleep(0)
                most = max(most, len(pending), len(core.listener._tasks) - 2)
        assert most == MAX_PENDING
        await refused(strangers[0])
        for raw in strangers:
            raw.close()

    with captured_logs() as events:
        core = with_core(test, handshake_s=60.0)
    assert core.listener.num_refused >= 2 * MAX_PENDING
    assert [event["count"] for event in events if event["event"] == "link.refused_peer"] == [1]


@pytest.mark.security
def test_an_address_with_many_connections_loses_one_before_an_address_with_one() -> None:
    async def main() -> None:
        listener = TcpListener("127.0.0.1", 0, KEY, print)
        waiting = [asyncio.create_task(asyncio.sleep(60)) for _ in range(3)]
        listener._pending = dict(zip(waiting, ("10.0.0.1", "10.0.0.2", "10.0.0.2"), strict=True))
        listener._end_one()
        assert list(listener._pending) == [waiting[0], waiting[2]] and waiting[1].cancelling()
        for task in waiting:
            task.cancel()

    asyncio.run(main())


@pytest.mark.security
def test_a_flood_from_one_ipv6_network_ends_no_connection_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(core: Core) -> None:
        loop, accept = asyncio.get_running_loop(), asyncio.get_running_loop().sock_accept
        peers = iter(["2001:db8:1::1", *(f"2001:db8:2::{number:x}" for number in range(MAX_PENDING))])

        async def accepted(sock: socket.socket) -> tuple[socket.socket, tuple[str, int]]:
            return (await accept(sock))[0], (next(peers), 1)

        for _ in range(10):
            await asyncio.sleep(0)
        monkeypatch.setattr(loop, "sock_accept", accepted)
        (await stranger(core)).close()  # which it was waiting to accept
        while core.listener.num_refused < 1:  # noqa: ASYNC110 - a turn or two
            await asyncio.sleep(0)
        other = await stranger(core)
        while not core.listener._pending:  # noqa: ASYNC110 - a turn or two
            await asyncio.sleep(0)
        strangers = [await stranger(core) for _ in range(MAX_PENDING)]
        while core.listener.num_refused < 2:  # noqa: ASYNC110 - a turn or two
            await asyncio.sleep(0)
        sources = list(core.listener._pending.values())
        assert "2001:db8:1::/64" in sources and sources.count("2001:db8:2::/64") == len(sources) - 1
        for raw in (other, *strangers):
            raw.close()

    with_core(test, handshake_s=60.0)


@pytest.mark.security
def test_refused_connections_of_an_address_are_logged_with_their_number_and_a_pause() -> None:
    refusals = RefusalLog()
    with captured_logs() as events:
        for now_s in (0.0, 1.0, 9.9, 10.0, 12.0):
            refusals.note("a", "r", now_s)
        refusals.note("b", "r", 12.0)
        for number in range(1000):
            refusals.note(f"{number}", "r", 13.0)
    assert [(event["peer"], event["count"]) for event in events[:3]] == [("a", 1), ("a", 3), ("b", 1)]
    assert len(refusals._addresses) == tcp.MAX_ADDRESSES


def test_a_connection_that_is_not_taken_is_closed_and_the_listener_starts_once() -> None:
    async def test(core: Core) -> None:
        taken = list[SocketTransport]()

        def fail(transport: SocketTransport) -> None:
            taken.append(transport)
            raise RuntimeError("no place")

        core.listener._on_connect = fail
        transport = await dial(*core.listener.address, KEY)
        assert await refused(transport._sock) == b""
        assert taken[0]._sock.fileno() == -1
        with pytest.raises(RuntimeError, match="listens on 127.0.0.1 already"):
            await core.listener.start()

    with captured_logs() as events:
        with_core(test)
    assert [event["event"] for event in events] == ["link.connect_failed"]


def test_the_links_timeout_bounds_what_stays_unacknowledged() -> None:
    async def test(core: Core) -> None:
        assert await ask(core, KEY, "one") == "one!"
        transport = await dial(*core.listener.address, KEY)
        link = Link(transport, CODEC, print, print, timeout_s=60.0)
        link.start()
        sock = transport._sock
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        link.close()

    with_core(test)


def test_what_was_sent_before_the_close_arrives_though_something_is_unread() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname())
            far, _ = server.accept()
        with far:
            far.setblocking(False)
            transport = SocketTransport(near)
            transport.start(lambda: None, lambda: None)
            loop.remove_reader(near)
            far.send(b"a ping")
            num_taken, num_received = transport.send(memoryview(bytes(16 << 20))), 0
            transport.close()
            transport.close()
            while data := await loop.sock_recv(far, 1 << 20):
                num_received += len(data)
            assert num_received == num_taken > 1 << 16
        while near.fileno() != -1:  # noqa: ASYNC110 - a turn or two
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), 20.0))
