"""Sessions of `/v1/responses` sockets: `response.create` in, the events of the response out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import orjson

from ...runtime.env.log import bound
from ..api.openai.prepared_request import stream_error
from ..api.responses.service import ParsedBody, ResponseService
from ..errors import ApiError, shorten
from ..http.request_context import MAX_ID_CHARS, session_in
from .base_session import SocketSession
from .context import SocketContext
from .peer import Peer

CREATE = "response.create"


class ResponsesSession(SocketSession):
    """The running responses of one socket; all of them end with it.

    Responses with the same `stream_id`, or without one, run one after another; different ids run concurrently.
    """

    def __init__(
        self, context: SocketContext, peer: Peer, owner: str, client_id: str, responses: ResponseService
    ) -> None:
        super().__init__(context, peer, owner)
        self._client_id = client_id
        self._responses = responses
        self._lanes: dict[str | None, asyncio.Task[None]] = {}  # the last task of each stream_id
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        return not self._tasks

    def leave(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def take(self, raw: dict[str, Any], num_bytes: int) -> None:
        lane = raw.pop("stream_id", None)
        try:
            _check(raw, lane)
            self._context.service.refuse_if_draining()
            if len(self._tasks) >= self._context.config.ws_max_streams:
                message = f"{len(self._tasks)} responses are running on this socket: wait for one to end"
                raise ApiError("rate_limit_exceeded", message, retry_after_s=1.0)
            parsed = await self._context.compute(num_bytes, self._responses.read, _body(raw))
        except ApiError as error:
            await self._send_error(error, _of(lane))
            return
        task = self._lanes[lane] = self._context.spawn(self._answer(parsed, lane, self._lanes.get(lane)))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._is_over(task, lane))

    def _is_over(self, task: asyncio.Task[None], lane: str | None) -> None:
        self._tasks.discard(task)
        if self._lanes.get(lane) is task:
            del self._lanes[lane]
        self.end_if_drained()

    async def _answer(self, parsed: ParsedBody, lane: str | None, before: asyncio.Task[None] | None) -> None:
        """Runs one response after `before` has ended.

        The response may continue the one before it, so `previous_response_id` is looked up only then. While the client
        does not read, no further events are taken from the response.
        """
        if before is not None:
            await asyncio.wait([before])
        with bound(request_id=parsed.id):
            try:
                more = {} if lane is None else {"stream_id": lane}
                async with aclosing(await self._events(parsed)) as events:
                    async for event in events:
                        await self.peer.send(orjson.dumps({**event, **more}))
            except ConnectionError:
                return  # the client has left
            except Exception as error:
                await self._send_error(stream_error(None, error, parsed.id), _of(lane))

    async def _events(self, parsed: ParsedBody) -> AsyncGenerator[Mapping[str, Any], None]:
        """Those of this front, or of the one that has the response it continues."""
        fronts = self._context.service.fronts
        if parsed.elsewhere is not None and fronts is not None:
            front, body = parsed.elsewhere
            return fronts.events(self.peer.headers, front, "/v1/responses", body)
        session = session_in(self.peer.headers)
        order = await self._responses.take(parsed, self.owner, self._client_id, session)
        return self._responses.events(order)


def _of(lane: Any) -> dict[str, Any]:
    """The fields of an error message that name the stream."""
    return {"stream_id": lane[:MAX_ID_CHARS]} if isinstance(lane, str) else {}


def _check(raw: Mapping[str, Any], lane: Any) -> None:
    kind = raw.get("type")
    if kind != CREATE:
        raise ApiError("invalid_value", f"type = {shorten(repr(kind), 64)}: must be {CREATE}", param="type")
    if lane is not None and not (isinstance(lane, str) and 0 < len(lane) <= MAX_ID_CHARS):
        raise ApiError(
            "invalid_value", f"stream_id: must be a string of 1 to {MAX_ID_CHARS} characters", param="stream_id"
        )
    for name, only, why in (
        ("stream", True, "responses on a socket are always streamed"),
        ("background", False, "a response on a socket ends with the socket"),
        ("generate", True, "warming up without an answer is not supported"),
    ):
        if raw.get(name) not in (None, only):
            raise ApiError("unsupported_parameter", f"{name}: {why}; leave it out", param=name)


def _body(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name not in ("type", "generate")} | {"stream": True}
