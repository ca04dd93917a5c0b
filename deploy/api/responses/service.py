"""The Responses API over whatever transport: from a body to the events that answer it, and what is kept of them.

Knows what a response goes on from and where it ends up. Refuses to know HTTP: `routes.py` does.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from ....stages.errors import RequestError
from ....stages.request_limits import MAX_CHARS_PER_TOKEN, chat_chars
from ...errors import ApiError
from ...http.json_limits import INLINE_BYTES
from ...http.sse import named_event
from ..adapter.chat_adapter import Chat, NameOf, Parts, read_adapted, take_order, under_way
from ..openai.generation import Generation, Order, told
from .bodies import ResponsesBody, name_of
from .events import Event, ResponseEvents, new_response
from .input_items import Item, messages_of, num_to_cut, read_items
from .store import ResponseStore, StoredResponse

PREFIX = "resp_"


@dataclass(frozen=True, slots=True)
class Asked:
    """A body that was read: what can be checked without knowing who asks."""

    id: str  # of the response; not to be guessed, as it is all it takes to read it where there are no keys
    body: ResponsesBody
    passed: Chat  # fields that chat takes as they are
    ignored: Sequence[str]  # names of fields that nobody knows
    items: Sequence[Item]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ResponseOrder:
    """A response that can be made."""

    id: str
    owner: str
    client_id: str  # X-Request-Id
    body: ResponsesBody
    order: Order
    items: bytes  # its own input, as JSON
    name_of: NameOf


class Responses:
    """Makes responses, and keeps those that are to be kept."""

    def __init__(self, generation: Generation, threads: Executor) -> None:
        self.service = generation.service
        self.store = ResponseStore(generation.service.config.response_store_bytes)
        self._generation = generation
        self._threads = threads
        self._tasks: set[asyncio.Task[None]] = set()

    # -- asking

    def read(self, raw: Mapping[str, Any]) -> Asked:
        """The body, checked as far as that goes alone. `ApiError` 400 names the field. May be called in a thread."""
        body, passed, ignored = read_adapted(ResponsesBody, raw, self.service.config.strict_fields)
        self.service.require_model(body.model)
        suffix = secrets.token_hex(16)
        return Asked(PREFIX + suffix, body, passed, ignored, read_items(body.input, suffix), len(orjson.dumps(raw)))

    async def take(self, asked: Asked, owner: str, client_id: str) -> ResponseOrder:
        """The order, with all that it goes on from. `ApiError` 400 names the field, 404 a response that is not kept."""
        self.service.require_engine()
        history = self._history(asked.body.previous_response_id, owner)
        num_bytes = asked.num_bytes + sum(map(len, history))
        limit = self.service.config.max_body_bytes
        if history and num_bytes > limit:
            message = (
                f"previous_response_id: with all that it goes on from there are {num_bytes} bytes: at most {limit}"
            )
            raise ApiError("context_length_exceeded", message, param="previous_response_id")
        make = partial(self._make_order, asked, owner, client_id, history)
        if num_bytes <= INLINE_BYTES and asked.body.truncation != "auto":
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._threads, make)

    def _make_order(self, asked: Asked, owner: str, client_id: str, history: Sequence[bytes]) -> ResponseOrder:
        earlier: list[Item] = [item for part in history for item in orjson.loads(part)]
        names = ["previous_response_id"] * len(earlier) + [f"input[{i}]" for i in range(len(asked.items))]
        messages, sources = messages_of([*earlier, *asked.items], names)
        items = orjson.dumps(asked.items)

        def without(num_cut: int) -> ResponseOrder:
            named = name_of(sources[num_cut:], num_before=int(asked.body.instructions is not None))
            order = take_order(self._generation, asked.body.chat(messages[num_cut:]) | asked.passed, named)
            return ResponseOrder(asked.id, owner, client_id, asked.body, order, items, named)

        num_cut = 0
        if asked.body.truncation == "auto":
            num_cut = num_to_cut(messages, lambda num_cut: self._fits(without(num_cut).order))
        return without(num_cut)

    def _fits(self, order: Order) -> bool:
        """Whether there is room for an answer behind the prompt. What the template refuses is for intake to say."""
        engine = self.service.require_engine()
        room = engine.info.max_model_len - (order.params.max_tokens or 1)
        chat = order.prompts[0].chat
        assert chat is not None, "the body of chat is a chat"
        if chat_chars(chat) > MAX_CHARS_PER_TOKEN * room:
            return False
        try:
            return len(engine.encoder.encode_chat(chat)) <= room
        except RequestError:
            return True

    def _history(self, previous_id: str | None, owner: str) -> list[bytes]:
        """Items of all that a response goes on from, in order."""
        if previous_id is None:
            return []
        chain = self.store.chain(previous_id, owner)
        if not chain[-1].is_over:
            message = f"previous_response_id = {previous_id!r}: that response is not over yet"
            raise ApiError("invalid_value", message, param="previous_response_id")
        return [part for stored in chain for part in (stored.items, stored.output)]

    # -- answering

    async def whole(self, order: ResponseOrder) -> dict[str, Any]:
        """The response, once it is over."""
        built = self._begin(order)
        built.begin()
        async with under_way(self._generation, self._open(order), order.order, order.name_of) as parts:
            async for more in parts:
                _add(built, more, parts)
        self._keep(order, built)
        return built.response

    async def events(self, order: ResponseOrder) -> AsyncGenerator[Event, None]:
        """The events of its stream, one after the other. See `batches`."""
        async with aclosing(self.batches(order)) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    async def batches(self, order: ResponseOrder) -> AsyncGenerator[list[Event], None]:
        """The events of its stream, all that are there at a time. What goes wrong before the first is raised, later it
        is told by an event. To be closed by whoever does not read to the end: with it ends the request."""
        built = self._begin(order)
        async with under_way(self._generation, self._open(order), order.order, order.name_of) as parts:
            first = await anext(parts)
            yield built.begin() + _add(built, first, parts)
            try:
                async for more in parts:
                    yield _add(built, more, parts)
            except Exception as error:
                yield built.fail(told(error, order.id))
        self._keep(order, built)

    def _begin(self, order: ResponseOrder) -> ResponseEvents:
        model = self.service.model_names[0]
        return ResponseEvents(new_response(order.id, model, order.body, order.order.params))

    def _open(self, order: ResponseOrder) -> str:
        return self.service.open(PREFIX, order.client_id, order.owner, answer_id=order.id)

    def _keep(self, order: ResponseOrder, built: ResponseEvents) -> None:
        if order.body.is_stored:
            stored = _stored(order, built)
            stored.is_over = True
            self.store.put(stored)

    # -- in the background

    def start(self, order: ResponseOrder) -> StoredResponse:
        """Has the response made while nobody waits for it. `ApiError` 429 if there is no room to keep it."""
        built = self._begin(order)
        queued = built.queue()
        stored = _stored(order, built)
        if order.body.stream:
            stored.events = []
        self._open(order)
        if not self.store.put(stored):
            self.service.close(order.id, "error")
            message = "there is no room to keep another response that is made in the background; wait for one"
            raise ApiError("rate_limit_exceeded", message, retry_after_s=1.0)
        self.store.grow(stored, _framed(queued))
        stored.task = asyncio.create_task(self._make(order, built, stored))
        self._tasks.add(stored.task)
        stored.task.add_done_callback(self._tasks.discard)
        return stored

    async def _make(self, order: ResponseOrder, built: ResponseEvents, stored: StoredResponse) -> None:
        try:
            async with under_way(self._generation, order.id, order.order, order.name_of) as parts:
                has_begun = False
                async for more in parts:
                    if not has_begun:
                        self._tell(stored, built, built.begin())
                        has_begun = True
                    self.store.grow(stored, _framed(_add(built, more, parts)))
        except Exception as error:
            self.store.grow(stored, _framed(built.fail(told(error, order.id))))
        finally:
            stored.is_over = True
            self._tell(stored, built, [])

    def _tell(self, stored: StoredResponse, built: ResponseEvents, events: Sequence[Event]) -> None:
        self.store.update(stored, orjson.dumps(built.response), orjson.dumps(built.response["output"]))
        self.store.grow(stored, _framed(events))
        stored.ring()

    async def cancel(self, response_id: str, owner: str) -> StoredResponse:
        """Ends a response that is made in the background, and returns it. One that is over stays as it is."""
        stored = self.store.get(response_id, owner)
        if stored.task is None:
            message = f"response_id = {response_id!r}: only a response made with background = true can be cancelled"
            raise ApiError("invalid_value", message, param="response_id")
        if not stored.is_over:
            self.service.abort(response_id, owner)
            await asyncio.wait([stored.task])
        return stored

    async def stop(self) -> None:
        """Ends all that is made in the background."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


def _add(built: ResponseEvents, more: Sequence[Any], parts: Parts) -> list[Event]:
    events = [event for part in more for event in built.add(part)]
    return events if parts.end is None else events + built.end(parts.end, parts.usage)


def _framed(events: Sequence[Event]) -> list[bytes]:
    return [named_event(event) for event in events]


def _stored(order: ResponseOrder, built: ResponseEvents) -> StoredResponse:
    previous_id = order.body.previous_response_id
    stored = StoredResponse(order.id, order.owner, previous_id, order.items, orjson.dumps(built.response))
    stored.output = orjson.dumps(built.response["output"])
    return stored
