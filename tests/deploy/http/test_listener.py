"""Accepting connections: when descriptors are scarce, and when there are too many connections."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import Any

import pytest
from aiohttp import web

from millrace.deploy.config import ServerConfig
from millrace.deploy.http import connections, listener
from millrace.deploy.http.listener import ServerRunner, Site
from millrace.deploy.http.listening import BACKLOG, ListeningSockets
from millrace.runtime.env.log import captured_logs
from tests.deploy.running import head_bytes
from tests.deploy.sockets import on_loop, until

PROBE, OTHER = "/health", "/other"


class FailingSocket(socket.socket):
    """A listening socket whose first calls of `accept` fail."""

    num_failures = 0
    num_accepts = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.num_accepts += 1
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


class Running:
    """A runner and its site, on `sock`."""

    def __init__(self, **config: Any) -> None:
        self.sock = FailingSocket()
        self.sock.bind(("127.0.0.1", 0))
        self.sock.listen(BACKLOG)
        self.address = self.sock.getsockname()
        self._config = ServerConfig(**config)
        self._goes_on = asyncio.Event()

    async def __aenter__(self) -> Running:
        app = web.Application()
        app.add_routes([web.get(PROBE, self._answer), web.get(OTHER, self._answer), web.get("/slow", self._wait)])
        self.runner = ServerRunner(app, self._config, [PROBE])
        await self.runner.setup()
        await Site(self.runner, ListeningSockets([self.sock]), self._config, None).start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._goes_on.set()
        await self.runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _wait(self, request: web.Request) -> web.Response:
        await self._goes_on.wait()
        return web.Response()

    @property
    def num_connections(self) -> int:
        assert self.runner.server is not None
        return len(self.runner.server.connections)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.address)

    async def ask(self, path: str) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
        """The status of an answer, and its connection."""
        reader, writer = await self.connect()
        writer.write(head_bytes("GET", path, {}))
        head = await reader.readuntil(b"\r\n\r\n")
        return int(head.split()[1]), reader, writer

    async def begin(self, path: str) -> asyncio.StreamWriter:
        """A connection with a request that has arrived."""
        before = self.num_connections
        _, writer = await self.connect()
        writer.write(head_bytes("GET", path, {}))
        await until(lambda: self.num_connections > before)
        return writer


@on_loop
async def test_without_free_descriptors_accepting_pauses_and_says_so_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener, "PAUSE_S", 0.02)
    with captured_logs() as logs:
        async with Running() as server:
            server.sock.num_failures = 3
            assert (await server.ask(OTHER))[0] == 200
            assert server.sock.num_accepts <= 5, "one try after each pause"
    assert [line["event"] for line in logs] == ["server.accepts_nothing", "server.accepts_again"]
    assert logs[0]["reason"] == "Too many open files" and logs[1]["paused_s"] >= 0.05


@on_loop
async def test_a_server_has_no_more_connections_than_descriptors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener, "open_files", lambda: 100)
    with captured_logs() as logs:
        async with Running(max_connections=53):
            pass
        async with Running(max_connections=52):
            pass
    assert [(line["event"], line["max_connections"]) for line in logs] == [("server.connections_limited", 52)]


@on_loop
async def test_a_full_server_closes_idle_connections_to_make_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "MIN_IDLE_S", 0.0)
    async with Running(max_connections=2) as server:
        busy = await server.begin("/slow")
        _, idle_reader, _ = await server.ask(OTHER)
        status, _, _ = await server.ask(OTHER)
        assert status == 200
        assert await idle_reader.read() == b"", "the idle one was closed"
        assert not busy.is_closing()


@on_loop
async def test_a_full_server_without_idle_connections_still_tells_its_health():
    async with Running(max_connections=2) as server:
        busy = [await server.begin("/slow") for _ in range(2)]
        for _ in range(3):
            status, reader, _ = await server.ask(OTHER)
            assert status == 503
            assert b"too_many_connections" in await reader.read()
            status, reader, _ = await server.ask(PROBE)
            assert status == 200
            await reader.read()  # its end
        reserved = [await server.connect() for _ in range(connections.NUM_RESERVED)]
        reader, _ = await server.connect()
        assert (await reader.readline()).startswith(b"HTTP/1.1 503 ")
        assert server.num_connections >= len(busy) + len(reserved)
