"""The Responses API without its transport: generation, streaming and storage of responses.

`routes.py` is the HTTP side.
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
from ...http.sized_threads import run_sized
from ...http.sse import named_event
from ..adapter.chat_adapter import AnswerParts, Chat, read_adapted, submit_chat, take_order
from ..openai.generation import Generation
from ..openai.prepared_request import PreparedRequest, stream_error
from ..service import CacheUse
from .bodies import ResponsesBody, name_of
from .events import Event, ResponseEvents, new_response
from .input_items import Item, messages_of, num_to_cut, read_items
from .store import ResponseStore, StoredResponse, exact

PREFIX = "resp_"
FETCH_S = 30.0  # a shutdown waits for clients that fetch a background response which ended this long ago, or less


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A validated body, before the owner's earlier responses are looked up."""

    id: str  # of the response; random, as without API keys the id alone gives access to it
    body: ResponsesBody
    passed: Chat  # fields that go to the chat body unchanged
    ignored: Sequence[str]  # names of unknown fields
    items: Sequence[Item]
    num_bytes: int
    elsewhere: tuple[int, bytes] | None = None  # the front that has the response it continues, and the body for it


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A validated request for a response, with its history."""

    id: str
    owner: str
    client_id: str  # X-Request-Id
    body: ResponsesBody
    order: PreparedRequest
    items: bytes  # its own input items, as JSON
    session: str  # as the header X-Session-Id names it; else the conversation's first stored response, or itself


class ResponseService:
    """Generates responses, and stores those with `store`."""

    def __init__(self, generation: Generation, threads: Executor) -> None:
        self.service = generation.service
        self.store = store = ResponseStore(generation.service.config.response_store_bytes)
        self.service.caches.append(
            lambda: CacheUse("responses", len(store), store.max_entries, store.num_bytes, store.max_bytes)
        )
        self._generation = generation
        self._threads = threads
        self._tasks: set[asyncio.Task[None]] = set()
        self._unfetched: dict[str, float] = {}  # background responses that are over -> since when, oldest first
        self._fetched = asyncio.Event()

    # -- reading requests

    def read(self, raw: Mapping[str, Any]) -> ParsedBody:
        """Validates a body alone. `ApiError` 400 names the wrong field. May be called in a thread."""
        body, passed, ignored = read_adapted(
            ResponsesBody, raw, self.service.config.strict_fields, self.service.ignored_fields.note
        )
        self.service.adapter_of(body.model)
        mark = self.service.mark
        suffix = mark + secrets.token_hex(16)[len(mark) :]
        previous = (body.previous_response_id or "").removeprefix(PREFIX)
        front = self.service.front_of(previous)
        data = orjson.dumps(raw)
        items = read_items(body.input, suffix)
        elsewhere = None if front is None else (front, data)
        return ParsedBody(PREFIX + suffix, body, passed, ignored, items, len(data), elsewhere)

    async def take(self, parsed: ParsedBody, owner: str, client_id: str, session: str = "") -> PreparedResponse:
        """The order with its history. `session`: as the client names it; "": not at all.

        `ApiError` 400 names the field; 404 a response that is not stored.
        """
        self.service.require_engine()
        chain = self._chain(parsed.body.previous_response_id, owner)
        history = [part for stored in chain for part in (stored.items, stored.output)]
        session = session or (chain[0].id if chain else parsed.id)
        num_bytes = parsed.num_bytes + sum(map(len, history))
        limit = self.service.config.max_body_bytes
        if history and num_bytes > limit:
            message = (
                f"previous_response_id: input and history have {num_bytes} bytes together; must have at most {limit}"
            )
            raise ApiError("context_length_exceeded", message, param="previous_response_id")
        make = partial(self._make_order, parsed, owner, client_id, session, history)
        if num_bytes <= INLINE_BYTES and parsed.body.truncation != "auto":
            return make()
        return await run_sized(self._threads, num_bytes, make)

    def _make_order(
        self, parsed: ParsedBody, owner: str, client_id: str, session: str, history: Sequence[bytes]
    ) -> PreparedResponse:
        earlier: list[Item] = [item for part in history for item in orjson.loads(part)]
        names = ["previous_response_id"] * len(earlier) + [f"input[{i}]" for i in range(len(parsed.items))]
        messages, sources = messages_of([*earlier, *parsed.items], names)
        items = orjson.dumps(parsed.items)

        def without(num_cut: int) -> PreparedResponse:
            named = name_of(sources[num_cut:], num_before=int(parsed.body.instructions is not None))
            order = take_order(self._generation, parsed.body.chat(messages[num_cut:]) | parsed.passed, named)
            return PreparedResponse(parsed.id, owner, client_id, parsed.body, order, items, session)

        num_cut = 0
        if parsed.body.truncation == "auto":
            num_cut = num_to_cut(messages, lambda num_cut: self._fits(without(num_cut).order))
        return without(num_cut)

    def _fits(self, order: PreparedRequest) -> bool:
        """Whether prompt and answer fit the context.

        True if the template fails: intake reports that error.
        """
        engine = self.service.require_engine()
        room = engine.info.max_model_len - (order.params.max_tokens or 1)
        chat = order.prompts[0].chat
        assert chat is not None, "a chat body has a chat prompt"
        if chat_chars(chat) > MAX_CHARS_PER_TOKEN * room:
            return False
        try:
            return len(engine.encoder.encode_chat(chat)) <= room
        except RequestError:
            return True

    def _chain(self, previous_id: str | None, owner: str) -> list[StoredResponse]:
        """All earlier responses that a response continues, oldest first."""
        if previous_id is None:
            return []
        chain = self.store.chain(previous_id, owner)
        if not chain[-1].is_over:
            message = f"previous_response_id = {previous_id!r}: that response is not complete yet; wait until it is"
            raise ApiError("invalid_value", message, param="previous_response_id")
        return chain

    # -- answering

    async def whole(self, order: PreparedResponse) -> dict[str, Any]:
        """Generates a response and returns it when it is complete."""
        built = self._begin(order)
        built.begin()
        async with submit_chat(self._generation, self._open(order), order.order) as parts:
            async for more in parts:
                _add(built, more, parts)
        self._keep(order, built)
        return built.response

    async def events(self, order: PreparedResponse) -> AsyncGenerator[Event, None]:
        """The events of a response's stream, one by one. See `batches`."""
        async with aclosing(self.batches(order)) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    async def batches(self, order: PreparedResponse) -> AsyncGenerator[list[Event], None]:
        """The events of a response's stream, in lists of all that have arrived.

        An error before the first event is raised; a later one becomes an event. A caller that does not read to the end
        must close the generator, which aborts the request.
        """
        built = self._begin(order)
        async with submit_chat(self._generation, self._open(order), order.order) as parts:
            first = await anext(parts)
            yield built.begin() + _add(built, first, parts)
            try:
                async for more in parts:
                    yield _add(built, more, parts)
            except Exception as error:
                yield built.fail(stream_error(order.order, error, order.id))
        self._keep(order, built)

    def _begin(self, order: PreparedResponse) -> ResponseEvents:
        model = self.service.answered_model(order.body.model)
        return ResponseEvents(new_response(order.id, model, order.body, order.order.params))

    def _open(self, order: PreparedResponse) -> str:
        return self.service.open(
            PREFIX,
            order.client_id,
            order.owner,
            answer_id=order.id,
            session=order.body.prompt_cache_key or order.session,
        )

    def _keep(self, order: PreparedResponse, built: ResponseEvents) -> None:
        if order.body.is_stored:
            stored = _stored(order, built)
            stored.is_over = True
            self.store.put(stored)

    # -- in the background

    def start(self, order: PreparedResponse) -> StoredResponse:
        """Generates a response in a background task. `ApiError` 429 if the store has no room for it."""
        built = self._begin(order)
        queued = built.queue()
        stored = _stored(order, built)
        if order.body.stream:
            stored.events = []
        self._open(order)
        if not self.store.put(stored):
            self.service.close(order.id, "error")
            message = "the store has no room for another background response; retry when one is complete"
            raise ApiError("rate_limit_exceeded", message, retry_after_s=1.0)
        self.store.grow(stored, _framed(queued))
        stored.task = asyncio.create_task(self._make(order, built, stored))
        self._tasks.add(stored.task)
        stored.task.add_done_callback(self._tasks.discard)
        return stored

    async def _make(self, order: PreparedResponse, built: ResponseEvents, stored: StoredResponse) -> None:
        try:
            async with submit_chat(self._generation, order.id, order.order) as parts:
                has_begun = False
                async for more in parts:
                    if not has_begun:
                        self._publish(stored, built, built.begin())
                        has_begun = True
                    self.store.grow(stored, _framed(_add(built, more, parts)))
        except Exception as error:
            self.store.grow(stored, _framed(built.fail(stream_error(order.order, error, order.id))))
        finally:
            stored.is_over = True
            self._publish(stored, built, [])
            self._unfetched[stored.id] = asyncio.get_running_loop().time()
            self._forget_old_ones()

    def _publish(self, stored: StoredResponse, built: ResponseEvents, events: Sequence[Event]) -> None:
        self.store.update(stored, orjson.dumps(built.response), orjson.dumps(built.response["output"]))
        self.store.grow(stored, _framed(events))
        stored.wake_readers()

    async def cancel(self, response_id: str, owner: str) -> StoredResponse:
        """Aborts a background response and returns it. A complete one stays as it is."""
        stored = self.store.get(response_id, owner)
        if stored.task is None:
            message = f"response_id = {response_id!r}: only a response created with background = true can be cancelled"
            raise ApiError("invalid_value", message, param="response_id")
        if not stored.is_over:
            self.service.abort(response_id, owner)
            await asyncio.wait([stored.task])
        return stored

    def note_fetched(self, stored: StoredResponse) -> None:
        """A client has got this response; if it is over, no shutdown waits for that."""
        if self._unfetched.pop(stored.id, None) is not None:
            self._fetched.set()

    async def wait_until_fetched(self, timeout_s: float) -> bool:
        """Waits until clients have fetched the background responses that ended a short while ago."""
        self._forget_old_ones()
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                while any(response_id in self.store for response_id in self._unfetched):
                    self._fetched.clear()
                    await self._fetched.wait()
        except TimeoutError:
            return False
        return True

    def _forget_old_ones(self) -> None:
        since_s = asyncio.get_running_loop().time() - FETCH_S
        while self._unfetched and self._unfetched[first := next(iter(self._unfetched))] < since_s:
            del self._unfetched[first]

    async def stop(self) -> None:
        """Cancels all background responses."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


def _add(built: ResponseEvents, more: Sequence[Any], parts: AnswerParts) -> list[Event]:
    events = [event for part in more for event in built.add(part)]
    return events if parts.end is None else events + built.end(parts.end, parts.usage)


def _framed(events: Sequence[Event]) -> list[bytes]:
    return [named_event(event) for event in events]


def _stored(order: PreparedResponse, built: ResponseEvents) -> StoredResponse:
    previous_id = order.body.previous_response_id
    stored = StoredResponse(order.id, order.owner, previous_id, order.items, orjson.dumps(built.response))
    stored.output = exact(orjson.dumps(built.response["output"]))
    return stored
