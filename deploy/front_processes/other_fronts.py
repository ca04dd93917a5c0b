"""`OtherFronts`: how a front passes on what another one has, at that one's Unix socket."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from aiohttp import (
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    ClientWebSocketResponse,
    ClientWSTimeout,
    StreamReader,
    UnixConnector,
    WSMsgType,
    web,
)
from multidict import CIMultiDict
from yarl import URL

from ...runtime.env.awake_time import AwakeTimeout
from ...stages.traffic.traffic_rules import TrafficRules
from ..api.service import Service
from ..config import ServerConfig
from ..errors import ApiError
from ..http.answer_record import RECORD, AnswerRecord
from ..http.body_reader import BODY
from ..http.connections import MAX_HEADER_LINE
from ..http.listening import ListeningSockets
from ..http.request_context import REQUEST_ID
from ..metrics.metrics import Metrics
from ..websocket.peer import GOING_AWAY, NORMAL
from .front_member import FrontMember
from .front_metrics import packed
from .models import ModelFronts
from .sockets import front_path, listen_at

MARK_CHARS = 2  # at the beginning of what is random in an id: the front's number, in hexadecimal
CONNECT_S = 2.0
ANSWER_S = 10.0  # for an answer about all fronts, which then does without that one
CLOSE_S = 1.0  # for the answer to the close of a WebSocket
OF_CONNECTION = frozenset(  # headers of one connection, which are not passed on
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "content-length"}
)
AUTO_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # not added to those of the client
OF_CLIENT = ("Authorization", "x-api-key", "Sec-WebSocket-Protocol", "Host", "Origin", "X-Session-Id")


class PassedSocket:
    """See `FrontSocket`."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self.is_over = False

    async def send(self, message: bytes) -> None:
        if self._socket.closed:
            raise ConnectionResetError("the front's socket has ended")
        await self._socket.send_str(message.decode())

    async def receive(self) -> bytes | None:
        message = await self._socket.receive()
        return str(message.data).encode() if message.type is WSMsgType.TEXT else None

    async def close(self) -> None:
        await self._socket.close(code=NORMAL if self.is_over else GOING_AWAY)


class OtherFronts:
    """See `Fronts`. One per front, on its loop."""

    def __init__(self, member: FrontMember, number: int, folder: Path, config: ServerConfig) -> None:
        self.member, self.number = member, number
        self.mark = mark_of(number)
        self.config, self._folder = config, folder
        self._sessions: dict[int, ClientSession] = {}
        self._service: Service | None = None
        self._metrics: Metrics | None = None

    # -- of this front

    def attach(self, service: Service, metrics: Metrics) -> None:
        """Called once, when the server is made."""
        self._service, self._metrics = service, metrics
        service.fronts = self

    def own_metrics(self) -> bytes:
        """This front's metrics alone, as the supervisor takes them."""
        assert self._metrics is not None
        return packed(self._metrics.collect())

    def listen(self) -> ListeningSockets:
        """The Unix socket at which other fronts reach this one."""
        path = front_path(self._folder, self.number)
        return ListeningSockets([listen_at(path)], path)

    async def close(self) -> None:
        """Closes the connections to the others."""
        await asyncio.gather(*(session.close() for session in self._sessions.values()))
        self._sessions.clear()

    # -- which front

    @property
    def numbers(self) -> list[int]:
        """The numbers of all fronts, this one's first."""
        others = [number for number in range(self.config.front_processes) if number != self.number]
        return [self.number, *others]

    @property
    def states(self) -> list[dict[str, Any]]:
        names = ("number", "pid", "state", "reason", "num_restarts")
        return [
            {name: getattr(state, name) for name in names} | {"models": list(state.models)}
            for state in self.member.states
        ]

    @property
    def models(self) -> ModelFronts:
        """Which front has which model."""
        return ModelFronts(self.member.states)

    def tell_traffic(self, rules: TrafficRules) -> None:
        self.member.tell_traffic(rules)

    def owner_of(self, marked: str) -> int | None:
        number = number_of(marked)
        return number if number in self.numbers[1:] else None

    def keeper_of(self, owner: str, key: str, group: Sequence[int]) -> int:
        """The front of a group that keeps the answer to the requests with this `Idempotency-Key`, asked anywhere."""
        digest = hashlib.sha256(f"{owner}\0{key}".encode("utf-8", "surrogateescape")).digest()
        return sorted(group)[int.from_bytes(digest[:8], "big") % len(group)]

    # -- passing

    async def pass_on(self, request: web.Request, front: int, body: bytes | None = None) -> web.StreamResponse:
        if BODY in request:
            body = request[BODY]  # to the byte, as the other front's kept answers ask
        elif body is None and request.can_read_body:
            body = await request.read()
        async with self._asked(request, front, body) as found:
            headers = CIMultiDict((k, v) for k, v in found.headers.items() if k.lower() not in OF_CONNECTION)
            if (record := request.get(RECORD)) is not None:
                return await _recorded(found, headers, record)
            response = web.StreamResponse(status=found.status, reason=found.reason, headers=headers)
            if (length := found.headers.get("Content-Length")) is not None:
                response.content_length = int(length)
            await response.prepare(request)
            if request.method != "HEAD":
                async for part in found.content.iter_any():
                    await self._in_time(request, response.write(part))
            await self._in_time(request, response.write_eof())
        return response

    async def _in_time(self, request: web.Request, writing: Awaitable[None]) -> None:
        try:
            async with AwakeTimeout(self.config.stalled_reader_s):
                await writing
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()  # as with any client that does not read
            raise asyncio.CancelledError from None

    async def answer_of(
        self,
        request: web.Request,
        front: int,
        path: str | None = None,
        body: bytes | None = None,
        *,
        method: str | None = None,
        limit_s: float = ANSWER_S,
    ) -> tuple[int, Any]:
        """Status and JSON of a front's answer to this request; `path`, `body` and `method` in place of its own.

        Without a body unless it is given. Asks HEAD as GET. 503 if the front is away, or gives no answer in `limit_s`.
        """
        method = method or ("GET" if request.method == "HEAD" else request.method)
        try:
            async with AwakeTimeout(limit_s), self._asked(request, front, body, path, method) as found:
                data = await found.read()
        except TimeoutError:
            error = _away(front)
        except ApiError as away:
            error = away
        else:
            return found.status, orjson.loads(data) if data else None
        return error.status, error.body()

    async def events(
        self, headers: Mapping[str, str], front: int, path: str, body: bytes
    ) -> AsyncGenerator[dict[str, Any], None]:
        async with self._connected(front), self._post(headers, front, path, body) as found:
            if found.status != 200:
                raise _error_of(found.status, await found.read())
            async for lines in whole(found.content, b"\n"):
                for line in lines.split(b"\n"):
                    if line.startswith(b"data: {"):
                        event: dict[str, Any] = orjson.loads(line[6:])
                        yield event

    @asynccontextmanager
    async def open_socket(self, headers: Mapping[str, str], front: int, path: str) -> AsyncIterator[PassedSocket]:
        kept = {name: headers[name] for name in OF_CLIENT if name in headers}
        protocols = [one.strip() for one in kept.pop("Sec-WebSocket-Protocol", "").split(",") if one.strip()]
        url, most = f"http://front{path}", self.config.max_body_bytes
        timeout = ClientWSTimeout(ws_close=CLOSE_S)
        async with self._connected(front):
            made = await self._session(front).ws_connect(
                url, headers=kept, protocols=protocols, max_msg_size=most, timeout=timeout
            )
        socket = PassedSocket(made)
        try:
            yield socket
        finally:
            await socket.close()

    @asynccontextmanager
    async def _asked(
        self, request: web.Request, front: int, body: bytes | None, path: str | None = None, method: str | None = None
    ) -> AsyncIterator[ClientResponse]:
        headers = CIMultiDict((k, v) for k, v in request.headers.items() if k.lower() not in OF_CONNECTION)
        headers["X-Request-Id"] = request[REQUEST_ID]
        url = URL(f"http://front{request.raw_path if path is None else path}", encoded=True)
        session, method = self._session(front), method or request.method
        async with (
            self._connected(front),
            session.request(method, url, headers=headers, data=body, allow_redirects=False) as found,
        ):
            yield found

    @asynccontextmanager
    async def _post(
        self, headers: Mapping[str, str], front: int, path: str, body: bytes
    ) -> AsyncIterator[ClientResponse]:
        kept = {name: headers[name] for name in OF_CLIENT if name in headers} | {"Content-Type": "application/json"}
        async with self._session(front).post(f"http://front{path}", headers=kept, data=body) as found:
            yield found

    @asynccontextmanager
    async def _connected(self, front: int) -> AsyncIterator[None]:
        """Turns a connection that cannot be made, or breaks before the answer, into 503."""
        try:
            yield
        except (ClientError, OSError) as error:
            if isinstance(error, ConnectionError) and not isinstance(error, ClientError):
                raise  # the client's own
            raise _away(front) from None

    def _session(self, front: int) -> ClientSession:
        if front not in self._sessions:
            self._sessions[front] = ClientSession(
                connector=UnixConnector(str(front_path(self._folder, front)), limit=0),
                timeout=ClientTimeout(total=None, sock_connect=CONNECT_S),
                auto_decompress=False,
                skip_auto_headers=AUTO_HEADERS,
                max_line_size=MAX_HEADER_LINE,
                max_field_size=MAX_HEADER_LINE,
            )
        return self._sessions[front]


async def whole(content: StreamReader, end: bytes) -> AsyncIterator[bytes]:
    """What comes, cut only behind an `end`, at any length: a reader of lines has a limit."""
    rest = bytearray()
    async for part in content.iter_any():
        num_seen = max(0, len(rest) - len(end) + 1)
        rest += part
        if (at := rest.rfind(end, num_seen)) >= 0:
            yield bytes(rest[: at + len(end)])
            del rest[: at + len(end)]
    if rest:
        yield bytes(rest)


async def _recorded(found: ClientResponse, headers: Mapping[str, str], record: AnswerRecord) -> web.StreamResponse:
    """The answer of another front; a stream goes into the record, from which the client is answered."""
    if found.content_type != "text/event-stream":
        return web.Response(status=found.status, reason=found.reason, body=await found.read(), headers=headers)
    record.begin(found.status, dict(headers), is_stream=True)
    async for events in whole(found.content, b"\n\n"):
        record.add(events)
    record.end()
    return web.StreamResponse()


def is_of_a_front(request: web.BaseRequest) -> bool:
    """Whether another front sent this request: it came over a Unix socket, which clients do not have here."""
    transport = request.transport
    return transport is not None and isinstance(transport.get_extra_info("sockname"), (str, bytes))


def mark_of(number: int) -> str:
    """What is random in an id begins with this, if the id lives in one front."""
    return f"{number:0{MARK_CHARS}x}"


def number_of(marked: str) -> int | None:
    """The number of the front that made this; None for anything else."""
    try:
        return int(marked[:MARK_CHARS], 16) if len(marked) > MARK_CHARS else None
    except ValueError:
        return None


def _away(front: int) -> ApiError:
    message = f"front {front}, which has what is asked for, is away; try again shortly"
    return ApiError("loading", message, retry_after_s=1.0)


def _error_of(status: int, body: bytes) -> ApiError:
    """The error that another front answered with."""
    try:
        error = orjson.loads(body)["error"]
        return ApiError(error["code"], error["message"], param=error.get("param"))
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ApiError("internal_error", f"another front answered {status}")
