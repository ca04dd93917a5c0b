"""The HTTP handlers of the Responses API; `service.py` does the work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from ...errors import ApiError, shorten
from ...http.body_reader import read
from ...http.query_params import flag, whole_number
from ...http.request_context import OWNER, REQUEST_ID, session_of
from ...http.sse import named_event, stream_framed
from ..openai.api_routes import ApiParts, ApiRoutes, post
from ..openai.prepared_request import ignored_headers
from .events import Event
from .input_items import MAX_ITEMS_LISTED
from .service import ResponseService
from .store import StoredResponse

if TYPE_CHECKING:
    from ..schema.operation import Operation


class ResponsesRoutes(ApiRoutes):
    """The handlers of `/v1/responses`; those of its socket are in `websocket`."""

    def __init__(self, parts: ApiParts) -> None:
        super().__init__(parts)
        self.responses = ResponseService(parts.generation, parts.threads)

    def table(self) -> list[web.RouteDef]:
        return [
            post("/v1/responses", self.create),
            web.get("/v1/responses/{id}", self.retrieve),
            web.delete("/v1/responses/{id}", self.delete),
            web.post("/v1/responses/{id}/cancel", self.cancel),
            web.get("/v1/responses/{id}/input_items", self.input_items),
        ]

    @staticmethod
    def operations() -> Sequence[Operation]:
        from .operations import OPERATIONS

        return OPERATIONS

    async def create(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/responses`."""
        self.service.require_engine()
        parsed = await read(request, self.service.config, self._threads, self.responses.read)
        if parsed.elsewhere is not None and self.service.fronts is not None:
            front, body = parsed.elsewhere
            return await self.service.fronts.pass_on(request, front, body)
        order = await self.responses.take(parsed, request[OWNER], request[REQUEST_ID], session_of(request))
        headers = ignored_headers([*parsed.ignored, *order.order.ignored])
        if order.body.background:
            stored = self.responses.start(order)
            if order.body.stream:
                return await self._stream(request, self._logged(stored, 0), headers)
            return _json(stored.response, headers)
        if order.body.stream:
            events = _framed(self.responses.batches(order))
            return await self._stream(request, events, headers, lambda: self.service.close(order.id, "stalled_reader"))
        return _json(orjson.dumps(await self.responses.whole(order)), headers)

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/responses/{id}`; with `stream=true` its past and future events."""
        stored = self._stored(request)
        first = whole_number(request, "starting_after", -1, least=0, most=2**31 - 1) + 1
        if not flag(request, "stream"):
            self.responses.note_fetched(stored)
            return _json(stored.response)
        if stored.events is None:
            message = "stream: requires a response created with background and stream whose events are still stored"
            raise ApiError("invalid_value", message, param="stream")
        return await self._stream(request, self._logged(stored, first), {})

    async def cancel(self, request: web.Request) -> web.Response:
        """`POST /v1/responses/{id}/cancel`."""
        stored = await self.responses.cancel(request.match_info["id"], request[OWNER])
        self.responses.note_fetched(stored)
        return _json(stored.response)

    async def delete(self, request: web.Request) -> web.Response:
        """`DELETE /v1/responses/{id}`; a response in progress is aborted."""
        stored = self.responses.store.delete(request.match_info["id"], request[OWNER])
        self.responses.note_fetched(stored)
        if not stored.is_over:
            self.service.abort(stored.id, request[OWNER])
        return _json(orjson.dumps({"id": stored.id, "object": "response", "deleted": True}))

    async def input_items(self, request: web.Request) -> web.Response:
        """`GET /v1/responses/{id}/input_items`: its input, with all turns that it continues."""
        stored = self._stored(request)
        chain = self.responses.store.chain(stored.id, request[OWNER], param="response_id")
        parts = [part for one in chain for part in (one.items, one.output)][:-1]
        limit = whole_number(request, "limit", 20, least=1, most=MAX_ITEMS_LISTED)
        order, after = request.query.get("order", "desc"), request.query.get("after")
        if order not in ("asc", "desc"):
            message = f"order = {shorten(repr(order), 64)}: must be asc or desc"
            raise ApiError("invalid_value", message, param="order")

        def listed() -> bytes:
            items = [item for part in parts for item in orjson.loads(part)]
            return orjson.dumps(_page(items if order == "asc" else items[::-1], after, limit))

        return _json(await asyncio.get_running_loop().run_in_executor(self._threads, listed))

    def _stored(self, request: web.Request) -> StoredResponse:
        """In every state of the server: a response that is complete needs no engine."""
        return self.responses.store.get(request.match_info["id"], request[OWNER])

    # -- streams

    async def _logged(self, stored: StoredResponse, first: int) -> AsyncGenerator[bytes, None]:
        """The events of a background response. The client may disconnect and reconnect."""
        num_sent = first
        async with aclosing(stored.events_from(first)) as batches:
            async for events in batches:
                num_sent += len(events)
                yield b"".join(events)
        if stored.events is not None:
            self.responses.note_fetched(stored)
        else:
            message = "the events of this response are no longer stored; GET it without stream"
            error = {"code": "server_error", "message": message, "param": None}
            yield named_event({"type": "error", "sequence_number": num_sent, **error})

    async def _stream(
        self,
        request: web.Request,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        on_stall: Callable[[], None] = lambda: None,
    ) -> web.StreamResponse:
        return await stream_framed(request, self.service.config.stalled_reader_s, events, headers, on_stall)


async def _framed(batches: AsyncGenerator[Sequence[Event], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(batches):
        async for events in batches:
            yield b"".join(map(named_event, events))


def _page(items: Sequence[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        message = f"after = {shorten(repr(after), 128)}: no such item exists"
        raise ApiError("invalid_value", message, param="after")
    first = 0 if after is None else ids.index(after) + 1
    page = items[first : first + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": first + limit < len(items),
    }


def _json(body: bytes, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=body, content_type="application/json", headers=headers)
