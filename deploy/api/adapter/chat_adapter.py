"""Base of the APIs other than chat: conversion to chat bodies, and back for errors.

This file maps field names. The values are checked once, by the chat body and the engine.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from ....kernels.layout.sampling_fields import FIELDS
from ..chat.body import ChatBody
from ..openai.generation import Generation
from ..openai.prepared_request import PreparedRequest, client_error
from ..schema.body import Body
from ..schema.hints import nullable
from ..schema.validation import NoteIgnored, read_body
from .answer_parts import AnswerEnd, Part, PartsReader, TokenUsage

if TYPE_CHECKING:
    from ....stages.exit.outboxes import RequestOutbox
    from ..assistant_turn import AssistantTurn

A = TypeVar("A", bound="AdaptedBody")

Chat = dict[str, Any]  # a chat body as plain data
NameOf = Callable[[str], str]  # from chat's name of a field to that of another API

# fields of chat that the other APIs do not define and that this server accepts there under the same names
EXTENSIONS = (*(field.name for field in FIELDS if field.is_extension), "priority", "cache_salt", "logits_processors")


class AdaptedBody(Body):
    """The body of another API, to be converted to a chat body."""

    PASSED: ClassVar[tuple[str, ...]] = EXTENSIONS  # fields that go to the chat body unchanged
    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = ()  # accepted, ignored, and not reported as ignored

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = super().__get_pydantic_json_schema__(core_schema, handler)
        fields = ChatBody.model_json_schema()["properties"]
        passed = {
            name: fields[name] if fields[name]["default"] is None else nullable(fields[name]) for name in cls.PASSED
        }
        handler.resolve_ref_schema(reference)["properties"] |= passed  # a null field is left out
        return reference


def read_adapted(
    kind: type[A], raw: Mapping[str, Any], strict_fields: bool, note: NoteIgnored | None = None
) -> tuple[A, Chat, list[str]]:
    """Returns the body, the fields passed on to chat, and the names of ignored unknown fields.

    `ApiError` 400 names the wrong field.
    """
    passed = {name: raw[name] for name in kind.PASSED if name in raw}
    own = {name: value for name, value in raw.items() if name not in passed and name not in kind.WITHOUT_EFFECT}
    body, ignored = read_body(kind, own, strict_fields, note)
    return body, passed, ignored


def take_order(generation: Generation, chat: Chat, name_of: NameOf) -> PreparedRequest:
    """Validates a chat body. Errors of this request, here and later, name its fields by `name_of`."""
    return generation.order(ChatBody, {name: value for name, value in chat.items() if value is not None}, name_of)


class AnswerParts:
    """The parts of a request's one answer, as an async iterator.

    Each item is the list of all parts that have arrived. `end` is the last part, once it has arrived; None before.
    """

    def __init__(self, outbox: RequestOutbox, turn: AssistantTurn | None = None) -> None:
        self.end: AnswerEnd | None = None
        self.token_ids: list[int] = []  # of the answer so far
        self.outbox = outbox
        self._reader = PartsReader(turn)

    @property
    def usage(self) -> TokenUsage:
        """Token counts so far."""
        outbox = self.outbox
        num_reasoning = self._reader.num_reasoning_tokens
        return TokenUsage(
            outbox.num_prompt_tokens, outbox.num_cached_tokens, outbox.num_generated_tokens, num_reasoning
        )

    def __aiter__(self) -> AnswerParts:
        return self

    async def __anext__(self) -> list[Part]:
        parts: list[Part] = []
        while not parts:
            for delta in await anext(self.outbox):
                self.token_ids += delta.token_ids
                parts += self._reader.read(delta)
        if isinstance(parts[-1], AnswerEnd):
            self.end = parts[-1]
        return parts


@asynccontextmanager
async def submit_chat(generation: Generation, answer_id: str, order: PreparedRequest) -> AsyncIterator[AnswerParts]:
    """Submits an order and yields its `AnswerParts`.

    On exit the request is closed, however the block ends. `answer_id` comes from `Service.open`. Errors inside the
    block are raised with the field names of the client's API.
    """
    cause = "disconnect"  # if no exception below sets another: the handler is cancelled when its client disconnects
    try:
        outbox = await generation.submit(answer_id, order)
        yield AnswerParts(outbox, None if order.make_turn is None else order.make_turn())
    except Exception as error:
        cause = "error"
        known = client_error(order, error)
        if known is error:
            raise
        raise known from error
    finally:
        generation.service.close(answer_id, cause)


def renamed(param: str, names: Mapping[str, str]) -> str:
    """Replaces the longest prefix of a path such as `a.b[0].c` that is a key of `names`."""
    parts = re.findall(r"[\w]+|\[\d+\]|\.", param)
    for end in range(len(parts), 0, -1):
        head = "".join(parts[:end])
        if head in names:
            return names[head] + "".join(parts[end:])
    return param
