"""OpenAI's protocol on a socket of `/v1/responses`: `response.create` in, the events of the response's stream out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import orjson

from ...runtime.log import bound
from ..errors import ApiError, not_serving, shorten
from ..generation import told
from ..responses import Asked, Responses
from .envelopes import MAX_ID_CHARS, error_members, parse
from .peer import GOING_AWAY, INVALID_PAYLOAD, Peer

if TYPE_CHECKING:
    from .hub import Hub

CREATE = "response.create"


class ResponsesSession:
    """What one such socket has under way: responses one after another, or with a `stream_id`, one after another of the
    same id and beside those of others. All of them end with the socket. `run` as `Session.run`."""

    def __init__(self, hub: Hub, peer: Peer, owner: str, client_id: str, responses: Responses) -> None:
        self.peer = peer
        self._owner = owner
        self._client_id = client_id
        self._hub = hub
        self._responses = responses
        self._lanes: dict[str | None, asyncio.Task[None]] = {}  # the last of each stream_id
        self._tasks: set[asyncio.Task[None]] = set()

    def end_if_drained(self) -> None:
        """Says goodbye if the server is to stop and nothing is under way here."""
        if self._hub.service.is_draining and not self._tasks:
            self._hub.spawn(self.peer.end(GOING_AWAY, not_serving(self._hub.service.health)))

    async def run(self) -> None:
        """Serves the client until it is gone."""
        try:
            while (data := await self.peer.receive()) is not None:
                await self._take(data)
        finally:
            for task in self._tasks:
                task.cancel()

    async def _take(self, data: bytes) -> None:
        try:
            raw = await self._hub.compute(len(data), parse, data, self._hub.config.max_body_bytes)
        except ApiError as error:
            await self.peer.end(INVALID_PAYLOAD, error)
            return
        lane = raw.pop("stream_id", None)
        try:
            _check(raw, lane)
            if len(self._tasks) >= self._hub.config.ws_max_streams:
                message = f"{len(self._tasks)} responses are under way on this socket: wait for one to end"
                raise ApiError("rate_limit_exceeded", message, retry_after_s=1.0)
            asked = await self._hub.compute(len(data), self._responses.read, _body(raw))
        except ApiError as error:
            await self._tell(error, lane)
            return
        task = self._lanes[lane] = self._hub.spawn(self._answer(asked, lane, self._lanes.get(lane)))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._is_over(task, lane))

    def _is_over(self, task: asyncio.Task[None], lane: str | None) -> None:
        self._tasks.discard(task)
        if self._lanes.get(lane) is task:
            del self._lanes[lane]
        self.end_if_drained()

    async def _answer(self, asked: Asked, lane: str | None, before: asyncio.Task[None] | None) -> None:
        """One response, once the one before it is over. It may go on from that, so what it goes on from is looked up
        then. A client that does not read is not read for."""
        if before is not None:
            await asyncio.wait([before])
        with bound(request_id=asked.id):
            try:
                order = await self._responses.take(asked, self._owner, self._client_id)
                more = {} if lane is None else {"stream_id": lane}
                async with aclosing(self._responses.events(order)) as events:
                    async for event in events:
                        await self.peer.send(orjson.dumps(event | more))
            except ConnectionError:
                return  # the client is gone
            except Exception as error:
                await self._tell(told(error, asked.id), lane)

    async def _tell(self, error: ApiError, lane: Any) -> None:
        self._hub.metrics.count_rejection(error.code)
        where = b"" if not isinstance(lane, str) else b',"stream_id":' + orjson.dumps(lane[:MAX_ID_CHARS])
        try:
            await self.peer.send(b'{"type":"error",%b%b}' % (error_members(error), where))
        except ConnectionError:
            return  # nobody is there to be told


def _check(raw: Mapping[str, Any], lane: Any) -> None:
    kind = raw.get("type")
    if kind != CREATE:
        raise ApiError("invalid_value", f"type = {shorten(repr(kind), 64)}: must be {CREATE}", param="type")
    if lane is not None and not (isinstance(lane, str) and 0 < len(lane) <= MAX_ID_CHARS):
        raise ApiError(
            "invalid_value", f"stream_id: must be a text of 1 to {MAX_ID_CHARS} characters", param="stream_id"
        )
    for name, only, why in (
        ("stream", True, "a socket always streams"),
        ("background", False, "a response of a socket ends with it"),
        ("generate", True, "a response without an answer has nothing to go on from"),
    ):
        if raw.get(name) not in (None, only):
            raise ApiError("unsupported_parameter", f"{name}: {why}; leave it out", param=name)


def _body(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name not in ("type", "generate")} | {"stream": True}
