"""Dials over TCP on loopback: what they meet instead of an engine of the fleet, and names with several addresses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable
from typing import Any

import pytest

from millrace.runtime.processes.auth import AuthError, KeyRefused
from millrace.runtime.processes.frames import HELLO, NoLink, pack_frame
from millrace.runtime.processes.link import Link
from millrace.runtime.processes.tcp import dial
from millrace.runtime.processes.tls import TlsError
from tests.runtime.processes.test_tcp import CODEC, KEY, OTHER, Core, refused, with_core


@pytest.mark.parametrize(
    ("first", "kind", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nServer: aiohttp\r\nContent-Length: 0\r\n\r\n", AuthError, "it speaks HTTP"),
        (b"\x15\x03\x03\x00\x02\x02\x28", TlsError, "it speaks TLS and this end does not"),
        (b"".join(pack_frame(HELLO, 0, b"{}" * 40)), AuthError, "it has no key and this end has one"),
        (bytes(32), KeyRefused, "at the proof of the key, so it has another one"),
        (b"", ConnectionError, "it closed the connection at once"),
        (bytes(31), ConnectionError, "it closed the connection at once"),
    ],
)
def test_a_dialer_tells_what_it_met_instead_of_its_engine(first: bytes, kind: type[Exception], said: str) -> None:
    async def main() -> None:
        async def other() -> None:
            sock, _ = await asyncio.get_running_loop().sock_accept(server)
            await asyncio.get_running_loop().sock_recv(sock, 64)
            await asyncio.get_running_loop().sock_sendall(sock, first)
            sock.shutdown(socket.SHUT_WR)
            await refused(sock)

        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            meeting = asyncio.ensure_future(other())
            with pytest.raises(kind, match=said):
                await dial(*server.getsockname(), KEY, timeout_s=20.0)
            await meeting

    asyncio.run(asyncio.wait_for(main(), 60.0))


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (b"\x15\x03\x03\x00\x02\x02\x28", "it speaks TLS and this end does not"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it speaks HTTP, so this port is not the one for fronts"),
        (bytes(32), "perhaps it wants a key"),
    ],
)
def test_a_link_without_a_key_tells_what_it_met_instead_of_its_engine(first: bytes, said: str) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            lost: asyncio.Future[Any] = loop.create_future()
            link = Link(await dial(*server.getsockname(), None), CODEC, print, lost.set_result)
            link.start()
            sock, _ = await loop.sock_accept(server)
            await loop.sock_sendall(sock, first)
            sock.close()
            error = await lost
            assert isinstance(error, NoLink) and said in str(error)

    asyncio.run(asyncio.wait_for(main(), 60.0))


@pytest.mark.security
def test_a_dialer_does_not_talk_to_a_listener_with_another_key() -> None:
    async def test(core: Core) -> None:
        async def lie() -> None:
            sock, _ = await asyncio.get_running_loop().sock_accept(server)
            await asyncio.get_running_loop().sock_sendall(sock, bytes(64))
            heard.append(await refused(sock))

        heard: list[bytes] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            lying = asyncio.ensure_future(lie())
            with pytest.raises(AuthError, match="the listener does not have this fleet's key"):
                await dial(*server.getsockname(), KEY)
            await lying
        assert len(heard[0]) <= 64, "its nonce, and its proof at most"

    with_core(test)


def test_a_name_whose_first_addresses_fail_or_do_not_answer_is_dialed_at_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(core: Core) -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            stream = (socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
            found = [(socket.AF_X25, *stream, ("x", 1))]  # a family that this kernel may lack
            others = [
                silent.getsockname(),
                *[core.listener.address] * 19,
            ]  # so that the silent one has a 20th of the time
            found += [(socket.AF_INET, *stream, address) for address in others]

            async def getaddrinfo(*_: Any, **__: Any) -> Any:
                return found

            monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
            (await dial("a", 1, KEY, timeout_s=20.0)).close()

    with_core(test)


def dialed(monkeypatch: pytest.MonkeyPatch, found: list[tuple[str, int]], **options: Any) -> Awaitable[Any]:
    """Dials a name that has these addresses."""

    async def getaddrinfo(*_: Any, **__: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", address) for address in found]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    return dial("engines", 1, KEY, timeout_s=20.0, **options)


@pytest.mark.security
def test_an_address_of_a_name_with_another_key_does_not_keep_from_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(core: Core) -> None:
        other = Core(OTHER)
        await other.listener.start()
        with socket.create_server(("127.0.0.1", 0)) as closed:
            away = closed.getsockname()
        wrong, right = other.listener.address, core.listener.address
        (await dialed(monkeypatch, [wrong, right])).close()
        (await dialed(monkeypatch, [away, wrong, right])).close()
        for addresses in ([away, wrong], [wrong, away]):
            with pytest.raises(AuthError, match="127.0.0.1: .*; 127.0.0.1: ") as refused:
                await dialed(monkeypatch, addresses)
            assert "Connection refused" in str(refused.value) and "at the proof of the key" in str(refused.value)
        with pytest.raises(ConnectionRefusedError) as failed:
            await dialed(monkeypatch, [away, away])
        assert failed.value.strerror == "127.0.0.1: Connection refused; 127.0.0.1: Connection refused"
        await other.listener.aclose()

    with_core(test)


def test_a_dial_that_fails_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with pytest.raises(TimeoutError):
            asyncio.run(dial(*address, KEY, timeout_s=0.05))
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(dial(*address, KEY))
