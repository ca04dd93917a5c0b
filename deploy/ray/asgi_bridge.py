"""An ASGI application that hands all requests to an HTTP server on a Unix socket, and streams the answers back.

Bodies pass in both directions as they come. When a client disconnects, so does the bridge, and the server cancels the
request. Does not import Ray.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

import aiohttp
from yarl import URL

Scope = Mapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

OF_ONE_HOP = frozenset(  # headers that concern one connection; what follows a handshake of a WebSocket is new, too
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
OF_A_HANDSHAKE = frozenset(
    {b"sec-websocket-key", b"sec-websocket-version", b"sec-websocket-extensions", b"sec-websocket-protocol"}
)
NOT_ADDED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
ABNORMAL, TOO_MANY = 1006, 1013  # close codes


class AsgiBridge:
    """See the module. `path` is the server's socket."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "lifespan":
                await self._live(receive, send)
            case "http":
                await self._forward(scope, receive, send)
            case "websocket":
                await self._join_sockets(scope, receive, send)

    async def aclose(self) -> None:
        """Ends all connections. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self.aclose()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(self._path, limit=0),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
                skip_auto_headers=NOT_ADDED,
            )
        return self._session

    # -- requests

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        body = _Body(receive, has_body)
        answering = asyncio.ensure_future(self._answer(scope, body.chunks() if has_body else None, send))
        leaving = asyncio.ensure_future(body.until_disconnected())
        try:
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _answer(self, scope: Scope, body: AsyncIterator[bytes] | None, send: Send) -> None:
        headers, has_begun = _headers(scope["headers"], OF_ONE_HOP), False
        try:
            async with self._client().request(
                scope["method"], _address(scope), headers=headers, data=body, allow_redirects=False
            ) as answer:
                kept = [one for one in answer.raw_headers if one[0].lower() not in OF_ONE_HOP]
                await send({"type": "http.response.start", "status": answer.status, "headers": kept})
                has_begun = True
                async for chunk in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except aiohttp.ClientError as error:
            if has_begun:
                raise  # the client sees that the answer is cut
            await _send_error(send, f"the replica's server cannot be reached: {type(error).__name__}")

    # -- WebSockets

    async def _join_sockets(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        headers = _headers(scope["headers"], OF_ONE_HOP | OF_A_HANDSHAKE)
        protocols = scope.get("subprotocols") or ()
        try:
            opening = self._client().ws_connect(
                _address(scope), headers=headers, protocols=protocols, max_msg_size=0, autoping=True
            )
            async with opening as socket:
                await send({"type": "websocket.accept", "subprotocol": socket.protocol})
                sending = asyncio.ensure_future(_to_server(receive, socket))
                try:
                    await _to_client(socket, send)
                finally:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
        except aiohttp.ClientError:  # refused: a wrong key, a wrong path, or too many sockets
            await send({"type": "websocket.close", "code": TOO_MANY})


class _Body:
    """What a client sends: the body, and that it has left."""

    def __init__(self, receive: Receive, has_body: bool) -> None:
        self._receive = receive
        self._is_over = asyncio.Event()  # all has come, or nothing more will
        self._is_gone = False
        if not has_body:
            self._is_over.set()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body's parts, as they come."""
        has_more = True
        while has_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._is_gone = True
                self._is_over.set()
                raise ConnectionResetError("the client left while it sent its request")
            has_more = message.get("more_body", False)
            if message.get("body"):
                yield message["body"]
        self._is_over.set()

    async def until_disconnected(self) -> None:
        """Waits until the client leaves. Reads nothing while `chunks` does."""
        await self._is_over.wait()
        while not self._is_gone:
            self._is_gone = (await self._receive())["type"] == "http.disconnect"


async def _to_server(receive: Receive, socket: aiohttp.ClientWebSocketResponse) -> None:
    while (message := await receive())["type"] != "websocket.disconnect":
        if message.get("text") is not None:
            await socket.send_str(message["text"])
        else:
            await socket.send_bytes(message.get("bytes") or b"")
    await socket.close()


async def _to_client(socket: aiohttp.ClientWebSocketResponse, send: Send) -> None:
    async for message in socket:
        kind = "text" if message.type is aiohttp.WSMsgType.TEXT else "bytes"
        await send({"type": "websocket.send", kind: message.data})
    with suppress(RuntimeError):  # the client has closed it
        code = socket.close_code or ABNORMAL
        await send({"type": "websocket.close", "code": 1011 if code == ABNORMAL else code})


def _address(scope: Scope) -> URL:
    """The server's address of a request: without the prefix at which the application is mounted."""
    path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1").partition("?")[0]
    root = scope.get("root_path", "").rstrip("/")
    if root and path.startswith(root + "/"):
        path = path[len(root) :]
    query = scope.get("query_string", b"").decode("latin-1")
    return URL(f"http://localhost{path or '/'}" + (f"?{query}" if query else ""), encoded=True)


def _headers(found: Iterable[tuple[bytes, bytes]], without: frozenset[bytes]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in found if name.lower() not in without]


async def _send_error(send: Send, message: str) -> None:
    body = json.dumps({"error": {"message": message, "type": "server_error", "code": "unavailable"}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
