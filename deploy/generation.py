"""Chat and completions: from a body to the engine and back, whole or as a stream.

Knows the life of one request, and that however its handler is left, the request ends.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from ..runtime.log import get_logger
from ..stages.beams import BeamParams
from ..stages.messages import Prompt, Request
from ..stages.params import SamplingParams
from .answers import DONE, Answer, ChatAnswer, Choice, CompletionAnswer, error_event, usage
from .bodies import ChatBody, CompletionBody
from .errors import ApiError, describe, unforeseen
from .middleware import OWNER, REQUEST_ID, settled_id
from .reading import read
from .service import Service
from .streams import EventStream
from .validation import read_body

if TYPE_CHECKING:
    from ..stages.outbox import RequestOutbox
    from ..stages.outputs import Delta

log = get_logger("millrace.deploy")


@dataclass(frozen=True, slots=True)
class Order:
    """What a client asked for, checked as far as that goes without the model."""

    body: ChatBody | CompletionBody
    ignored: Sequence[str]  # names of fields that nobody knows
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    beams: BeamParams | None  # if it is a beam search

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n


class Generation:
    """The handlers of the two endpoints that generate text."""

    def __init__(self, service: Service, threads: Executor) -> None:
        self.service = service
        self._threads = threads

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        return await self._generate(request, ChatBody, ChatAnswer)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        return await self._generate(request, CompletionBody, CompletionAnswer)

    async def _generate(
        self, request: web.Request, kind: type[ChatBody] | type[CompletionBody], shape: type[Answer]
    ) -> web.StreamResponse:
        order = await self._take_order(request, kind)
        if order.body.request_id is not None:
            request[REQUEST_ID] = settled_id(order.body.request_id)
        answer_id = self.service.open(shape.PREFIX, request[REQUEST_ID], request[OWNER])
        cause = "disconnect"  # of an end that nobody here foresees: the handler is cancelled when its client leaves
        try:
            outbox = await self._submit(answer_id, order, request[OWNER])
            answer = self._answer(shape, answer_id, order)
            if order.body.stream:
                return await self._stream(request, order, answer, outbox)
            return await self._whole(request, order, answer, outbox)
        except ApiError:
            raise
        except Exception as error:
            cause = "error"
            raise _in_terms_of(order.body, error, request[REQUEST_ID]) from error
        finally:
            self.service.close(answer_id, cause)

    async def _take_order(self, request: web.Request, kind: type[ChatBody] | type[CompletionBody]) -> Order:
        engine = self.service.require_engine()
        defaults = engine.info.default_params
        strict_fields = self.service.config.strict_fields

        def make(raw: Mapping[str, Any]) -> Order:
            body, ignored = read_body(kind, raw, strict_fields)
            self.service.require_model(body.model)
            return Order(body, ignored, body.prompts(), body.sampling_params(defaults), body.beam_params())

        order = await read(request, self.service.config, self._threads, make)
        if order.ignored:
            log.debug("request.fields_ignored", fields=_listed(order.ignored))
        return order

    async def _submit(self, answer_id: str, order: Order, owner: str) -> RequestOutbox:
        asked = Request(
            answer_id,
            order.prompts,
            order.params,
            priority=order.body.priority,
            cache_salt=self.service.cache_salt(order.body.cache_salt, owner),
            arrival_s=asyncio.get_running_loop().time(),
        )
        if order.beams is not None:
            return self.service.require_engine().submit_search(asked, order.beams)
        # a burst waits its turn at the door for microseconds; who may stay is for admission to say, behind it
        return await self.service.require_engine().submit(asked, wait=True)

    def _answer(self, shape: type[Answer], answer_id: str, order: Order) -> Answer:
        options = order.body.stream_options
        forced = self.service.config.enable_force_include_usage
        return shape(
            answer_id,
            int(time.time()),
            self.service.model_names[0],
            has_usage=forced or bool(options and options.include_usage),
            has_running_usage=bool(options and options.continuous_usage_stats),
        )

    async def _whole(
        self, request: web.Request, order: Order, answer: Answer, outbox: RequestOutbox
    ) -> web.StreamResponse:
        choices = [Choice(index) for index in range(order.num_choices)]
        async for deltas in outbox:
            for delta in deltas:
                choices[delta.index].add(delta, keep=True)
        body = orjson.dumps(answer.whole(choices, _usage(outbox, choices)))
        return web.Response(body=body, content_type="application/json", headers=_headers(order))

    async def _stream(
        self, request: web.Request, order: Order, answer: Answer, outbox: RequestOutbox
    ) -> web.StreamResponse:
        """The answer as events. Nothing is sent before the first piece is there, so that what goes wrong before it
        still has a status of its own."""
        pieces = aiter(outbox)
        first: list[Delta] = await anext(pieces, [])
        stream = EventStream(request, self.service.config.stalled_reader_s, _headers(order))
        try:
            async with stream:
                await stream.send(answer.opening(order.num_choices))
                await self._send_pieces(stream, answer, outbox, first, pieces, order.num_choices)
                await stream.send(DONE)
                return await stream.finish()
        except ConnectionError:
            raise asyncio.CancelledError from None  # gone, as a handler hears it otherwise
        finally:
            if stream.has_stalled:
                self.service.close(answer.id, "stalled_reader")

    async def _send_pieces(
        self,
        stream: EventStream,
        answer: Answer,
        outbox: RequestOutbox,
        first: list[Delta],
        pieces: AsyncIterator[list[Delta]],
        num_choices: int,
    ) -> None:
        choices = [Choice(index) for index in range(num_choices)]
        try:
            await stream.send(_events(answer, outbox, choices, first))
            async for deltas in pieces:
                if events := _events(answer, outbox, choices, deltas):
                    await stream.send(events)
            if answer.has_usage:
                await stream.send(answer.usage_event(_usage(outbox, choices)))
        except ConnectionError:
            raise
        except Exception as error:
            known = describe(error)
            if known is None:
                log.error("request.failed", error=type(error).__name__, exc_info=error)
            await stream.send(error_event(known or unforeseen(answer.id)))


def _events(answer: Answer, outbox: RequestOutbox, choices: Sequence[Choice], deltas: Sequence[Delta]) -> bytes:
    events = []
    for delta in deltas:
        choice = choices[delta.index]
        choice.add(delta, keep=False)
        running = _usage(outbox, choices) if answer.has_running_usage else None
        events.append(answer.chunk(choice, delta, running))
    return b"".join(events)


def _usage(outbox: RequestOutbox, choices: Sequence[Choice]) -> dict[str, Any]:
    return usage(outbox.num_prompt_tokens, outbox.num_cached_tokens, choices)


def _in_terms_of(body: ChatBody | CompletionBody, error: Exception, request_id: str) -> Exception:
    """The error in the client's words: intake calls a chat's messages the prompt, and max_tokens by its older name."""
    known = describe(error)
    if known is None:
        return error
    known.param = body.client_name(known.param)
    return known


def _headers(order: Order) -> dict[str, str]:
    return {"X-Ignored-Fields": _listed(order.ignored)} if order.ignored else {}


def _listed(names: Sequence[str]) -> str:
    """Field names as a header may hold them: the first 32, each cut, and without what does not belong there."""
    return ", ".join(re.sub(r"[^A-Za-z0-9_.-]", "?", name[:64]) for name in names[:32])
