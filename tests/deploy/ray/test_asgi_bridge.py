"""The bridge between ASGI and our server, without Ray: bodies, streams, disconnects, WebSockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from millrace.deploy.ray.asgi_bridge import AsgiBridge


@asynccontextmanager
async def bridged(folder: Path, **handlers: Any) -> AsyncIterator[AsgiBridge]:
    """A bridge to a server on a socket in `folder`, with these handlers at /<name>."""
    app = web.Application()
    app.add_routes([web.route("*", f"/{name}", handler) for name, handler in handlers.items()])
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "s")).start()
    bridge = AsgiBridge(str(folder / "s"))
    try:
        yield bridge
    finally:
        await bridge.aclose()
        await runner.cleanup()


class Client:
    """The other end of an ASGI application. What it sends is in `inbox`, what it got in `got`."""

    def __init__(self, bridge: AsgiBridge, path: str, *messages: dict[str, Any], **scope: Any) -> None:
        self.inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for message in messages:
            self.inbox.put_nowait(message)
        self.got: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        found = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [], "root_path": ""}
        found["headers"] = [(b"host", b"example.com"), (b"content-length", b"5"), (b"Connection", b"close")]
        self.task = asyncio.ensure_future(bridge(found | scope, self.inbox.get, self._send))

    async def _send(self, message: Any) -> None:
        self.got.put_nowait(dict(message))

    async def all(self) -> tuple[int, dict[bytes, bytes], bytes]:
        await self.task
        start, *parts = [self.got.get_nowait() for _ in range(self.got.qsize())]
        assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
        return start["status"], dict(start["headers"]), b"".join(part["body"] for part in parts)


def body(data: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


LEFT = {"type": "http.disconnect"}


async def echo(request: web.Request) -> web.Response:
    seen = {"query": request.query_string, "host": request.headers["Host"], "text": (await request.read()).decode()}
    return web.Response(status=207, body=orjson.dumps(seen), headers={"X-A": "1"})


def test_requests_and_answers_pass_as_they_are(tmp_path: Path) -> None:
    async def main() -> None:
        async with bridged(tmp_path, echo=echo) as bridge:
            sent = (body(b"he", more=True), body(b"", more=True), body(b"llo"))
            client = Client(bridge, "/at/echo", *sent, root_path="/at", query_string=b"a=%2F&b")
            status, headers, text = await client.all()
            assert status == 207 and headers[b"X-A"] == b"1" and int(headers[b"Content-Length"]) == len(text)
            assert orjson.loads(text) == {"query": "a=/&b", "host": "example.com", "text": "hello"}
            bare = Client(bridge, "/none", method="GET", headers=[(b"host", b"x")])
            assert (await bare.all())[0] == 404

    asyncio.run(main())


def test_events_pass_one_by_one_and_a_client_that_leaves_cancels_its_request(tmp_path: Path) -> None:
    async def main() -> None:
        go_on, cancelled = asyncio.Event(), asyncio.Event()

        async def stream(request: web.Request) -> web.StreamResponse:
            answer = web.StreamResponse()
            await answer.prepare(request)
            await answer.write(b"data: 1\n\n")
            try:
                await go_on.wait()
                await answer.write(b"data: 2\n\n")
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
            return answer

        async with bridged(tmp_path, stream=stream) as bridge:
            client = Client(bridge, "/stream", body(b"hello"))
            assert (await client.got.get())["status"] == 200
            assert (await client.got.get())["body"] == b"data: 1\n\n"
            go_on.set()
            assert (await client.got.get())["body"] == b"data: 2\n\n"
            client.inbox.put_nowait(LEFT)
            await asyncio.wait_for(cancelled.wait(), 10)
            await client.task

            cancelled.clear()
            other = Client(bridge, "/stream", body(b"hello"))
            await other.got.get()
            other.task.cancel()  # as Serve does
            await asyncio.wait_for(cancelled.wait(), 10)

    asyncio.run(main())


def test_a_server_that_is_gone_is_a_503(tmp_path: Path) -> None:
    async def main() -> None:
        status, headers, text = await Client(AsgiBridge(str(tmp_path / "none")), "/v1/models", body(b"hello")).all()
        assert status == 503 and headers[b"content-type"] == b"application/json"
        assert "cannot be reached" in orjson.loads(text)["error"]["message"]

    asyncio.run(main())


def test_websockets_pass_in_both_directions(tmp_path: Path) -> None:
    async def socket(request: web.Request) -> web.WebSocketResponse:
        answer = web.WebSocketResponse(protocols=["b"])
        await answer.prepare(request)
        async for message in answer:
            if message.data == "end":
                await answer.close(code=4001)
            else:
                await answer.send_str(f"{message.data}!")
        return answer

    async def main() -> None:
        async with bridged(tmp_path, socket=socket) as bridge:
            scope = {"type": "websocket", "headers": [(b"host", b"x")], "subprotocols": ["a", "b"]}
            client = Client(bridge, "/socket", {"type": "websocket.connect"}, **scope)
            assert await client.got.get() == {"type": "websocket.accept", "subprotocol": "b"}
            client.inbox.put_nowait({"type": "websocket.receive", "text": "hi"})
            assert await client.got.get() == {"type": "websocket.send", "text": "hi!"}
            client.inbox.put_nowait({"type": "websocket.receive", "text": "end"})
            assert await client.got.get() == {"type": "websocket.close", "code": 4001}
            await client.task

            refused = Client(bridge, "/none", {"type": "websocket.connect"}, **scope)
            assert (await refused.got.get())["type"] == "websocket.close"
            await refused.task

    asyncio.run(main())


def test_the_life_of_an_application_is_acknowledged(tmp_path: Path) -> None:
    async def main() -> None:
        messages = [{"type": f"lifespan.{name}"} for name in ("startup", "shutdown")]
        client = Client(AsgiBridge(str(tmp_path / "none")), "/", *messages, type="lifespan")
        await client.task
        assert [client.got.get_nowait()["type"] for _ in messages] == [
            "lifespan.startup.complete",
            "lifespan.shutdown.complete",
        ]

    asyncio.run(main())
