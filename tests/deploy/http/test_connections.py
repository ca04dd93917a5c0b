"""Connections without routes."""

from __future__ import annotations

import asyncio

from aiohttp import web

from millrace.deploy.http.connections import Listener
from tests.deploy.running import head_bytes
from tests.deploy.sockets import on_loop


@on_loop
async def test_the_loop_turns_between_pipelined_requests():
    loop = asyncio.get_running_loop()
    turn = 0
    handled_in: list[int] = []

    def count() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(count)

    async def answer(request: web.BaseRequest) -> web.Response:
        handled_in.append(turn)
        return web.Response()

    count()
    listener = Listener(answer, max_connections=1, header_timeout_s=10.0, access_log=None)
    async with await loop.create_server(listener, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(head_bytes("GET", "/", {}) * 99 + head_bytes("GET", "/", {"Connection": "close"}))
        answers = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert answers.count(b"HTTP/1.1 200") == 100
    assert len(set(handled_in)) == 100, "each in a turn of its own"
