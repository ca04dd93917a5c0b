"""The HTTP handlers of the Messages API, whole answers and streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from ....stages.errors import RequestError
from ....stages.request_limits import chat_chars
from ...http.body_reader import read
from ...http.request_context import OWNER, REQUEST_ID, session_of
from ...http.sized_threads import run_sized
from ...http.sse import named_event, stream_framed
from ..adapter.chat_adapter import AnswerParts, read_adapted, submit_chat, take_order
from ..openai.api_routes import ApiRoutes, post
from ..openai.prepared_request import PreparedRequest, client_error, ignored_headers, stream_error
from ..openai.prompts import check_length
from .bodies import CountTokensBody, MessagesBody, name_of
from .events import MESSAGES_PATH, Event, MessageEvents, error_body

if TYPE_CHECKING:
    from ..schema.operation import Operation

PREFIX = "msg_"


@dataclass(frozen=True, slots=True)
class PreparedMessage:
    """A validated request for a message."""

    is_stream: bool
    order: PreparedRequest
    ignored: Sequence[str]  # names of unknown fields


class MessagesRoutes(ApiRoutes):
    """The handlers of `/v1/messages`."""

    def table(self) -> list[web.RouteDef]:
        return [post(MESSAGES_PATH, self.create), post(f"{MESSAGES_PATH}/count_tokens", self.count_tokens)]

    @staticmethod
    def operations() -> Sequence[Operation]:
        from .operations import OPERATIONS

        return OPERATIONS

    async def create(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/messages`."""
        order = await self._take(request, MessagesBody)
        answer_id = self.service.open(PREFIX, request[REQUEST_ID], request[OWNER], session=session_of(request))
        stops = order.order.params.stop
        built = MessageEvents(answer_id, self.service.answered_model(order.order.body.model), stops)
        headers = {"request-id": request[REQUEST_ID]} | ignored_headers(order.ignored)
        if not order.is_stream:
            async with submit_chat(self._generation, answer_id, order.order) as parts:
                async for more in parts:
                    _add(built, more, parts)
            return web.json_response(body=orjson.dumps(built.message), headers=headers)
        stalled_reader_s = self.service.config.stalled_reader_s
        return await stream_framed(
            request,
            stalled_reader_s,
            self._stream(answer_id, order, built),
            headers,
            on_stall=lambda: self.service.close(answer_id, "stalled_reader"),
        )

    async def _stream(
        self, answer_id: str, order: PreparedMessage, built: MessageEvents
    ) -> AsyncGenerator[bytes, None]:
        async with submit_chat(self._generation, answer_id, order.order) as parts:
            first = await anext(parts)
            yield _framed(built.begin(parts.usage) + _add(built, first, parts))
            try:
                async for more in parts:
                    yield _framed(_add(built, more, parts))
            except Exception as error:
                yield _framed([error_body(stream_error(order.order, error, answer_id), answer_id.removeprefix(PREFIX))])

    async def count_tokens(self, request: web.Request) -> web.Response:
        """`POST /v1/messages/count_tokens`."""
        order = await self._take(request, CountTokensBody)
        encoder, chat = self.service.require_engine().encoder, order.order.prompts[0].chat
        assert chat is not None, "a chat body has a chat prompt"
        count = chat_chars(chat)
        check_length(count, self.service.require_engine().info.max_model_len, "messages")
        try:
            token_ids = await run_sized(self._threads, count, encoder.encode_chat, chat)
        except RequestError as error:
            raise client_error(order.order, error) from None
        return web.json_response({"input_tokens": len(token_ids)}, headers=ignored_headers(order.ignored))

    async def _take(self, request: web.Request, kind: type[CountTokensBody]) -> PreparedMessage:
        self.service.require_engine()
        return await read(request, self.service.config, self._threads, partial(self._read, kind))

    def _read(self, kind: type[CountTokensBody], raw: Mapping[str, Any]) -> PreparedMessage:
        """Validates a body. `ApiError` names the wrong field. May be called in a thread."""
        body, passed, ignored = read_adapted(
            kind, raw, self.service.config.strict_fields, self.service.ignored_fields.note
        )
        chat, sources = body.chat()
        if chat.get("thinking_budget") is not None and not self.service.require_chat_format().has_thoughts:
            del chat["thinking_budget"]
            ignored.append("thinking")
        order = take_order(self._generation, chat | passed | {"model": body.model}, name_of(sources))
        return PreparedMessage(bool(getattr(body, "stream", None)), order, [*ignored, *order.ignored])


def _framed(events: Sequence[Event]) -> bytes:
    return b"".join(map(named_event, events))


def _add(built: MessageEvents, more: Sequence[Any], parts: AnswerParts) -> list[Event]:
    events = [event for part in more for event in built.add(part)]
    return events if parts.end is None else events + built.end(parts.end, parts.usage)
