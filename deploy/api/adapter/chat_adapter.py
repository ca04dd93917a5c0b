"""What the APIs that are spoken besides chat have in common: they become a body of chat, and its errors their own.

Knows how fields are called here and there. What a field may be is said once, by chat's body and behind it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from ...errors import ApiError
from ..openai.bodies import ChatBody
from ..openai.generation import Generation, Order, in_terms_of
from ..schema.body import Body
from ..schema.hints import nullable
from ..schema.validation import read_body
from .answer_parts import End, Part, PartsReader, Usage

if TYPE_CHECKING:
    from ....stages.exit.outboxes import RequestOutbox
    from ..assistant_turn import Turn

A = TypeVar("A", bound="AdaptedBody")

Chat = dict[str, Any]  # a body of chat as plain data
NameOf = Callable[[str], str]

# fields of chat that the other APIs do not have, and that may be sent all the same, under the same names
EXTENSIONS = (
    "min_tokens",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "logit_bias",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "priority",
    "cache_salt",
)

# fields of chat that errors may speak of besides the one that is wrong
TOLD_BESIDE = ("max_tokens", "structured_outputs.json", "structured_outputs")


class AdaptedBody(Body):
    """The body of another API, which becomes one of chat."""

    PASSED: ClassVar[tuple[str, ...]] = EXTENSIONS  # fields that chat takes as they are
    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = ()  # accepted without a word

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = super().__get_pydantic_json_schema__(core_schema, handler)
        fields = ChatBody.model_json_schema()["properties"]
        passed = {
            name: fields[name] if fields[name]["default"] is None else nullable(fields[name]) for name in cls.PASSED
        }
        handler.resolve_ref_schema(reference)["properties"] |= passed  # what is null is left out
        return reference


def read_adapted(kind: type[A], raw: Mapping[str, Any], strict_fields: bool) -> tuple[A, Chat, list[str]]:
    """The body, the fields of it that chat takes as they are, and the names of those that nobody knows. `ApiError` 400
    names the field."""
    passed = {name: raw[name] for name in kind.PASSED if name in raw}
    own = {name: value for name, value in raw.items() if name not in passed and name not in kind.WITHOUT_EFFECT}
    body, ignored = read_body(kind, own, strict_fields)
    return body, passed, ignored


def take_order(generation: Generation, chat: Chat, name_of: NameOf) -> Order:
    """The order that `chat` is. `ApiError` 400 speaks of the fields of the API that it was made from."""
    try:
        return generation.order(ChatBody, {name: value for name, value in chat.items() if value is not None})
    except ApiError as error:
        raise in_own_words(error, name_of) from None


class Parts:
    """The parts of the one answer to a request, as they come: an async iterator over lists, all that is there. `end` is
    the last of all, once it has come."""

    def __init__(self, outbox: RequestOutbox, turn: Turn | None = None) -> None:
        self.end: End | None = None
        self._outbox = outbox
        self._reader = PartsReader(turn)

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        outbox = self._outbox
        num_reasoning = self._reader.num_reasoning_tokens
        return Usage(outbox.num_prompt_tokens, outbox.num_cached_tokens, outbox.num_generated_tokens, num_reasoning)

    def __aiter__(self) -> Parts:
        return self

    async def __anext__(self) -> list[Part]:
        parts: list[Part] = []
        while not parts:
            for delta in await anext(self._outbox):
                parts += self._reader.read(delta)
        if isinstance(parts[-1], End):
            self.end = parts[-1]
        return parts


@asynccontextmanager
async def under_way(generation: Generation, answer_id: str, order: Order, name_of: NameOf) -> AsyncIterator[Parts]:
    """Has an order carried out, under an id that `Service.open` gave, which is closed at the end. However the block is
    left, the request is over then. What goes wrong in it is told in the words of the API that was asked."""
    cause = "disconnect"  # of an end that nobody here foresees: the handler is cancelled when its client leaves
    try:
        outbox = await generation.submit(answer_id, order)
        yield Parts(outbox, None if order.make_turn is None else order.make_turn())
    except Exception as error:
        cause = "error"
        known = in_terms_of(order.body, error, answer_id)
        if isinstance(known, ApiError):
            raise in_own_words(known, name_of) from error
        raise
    finally:
        generation.service.close(answer_id, cause)


def in_own_words(error: ApiError, name_of: NameOf) -> ApiError:
    """The same error, of fields as `name_of` calls them. Changes `error` and returns it."""
    for theirs in (error.param, *TOLD_BESIDE):
        if theirs is not None:
            error.message = _replaced(error.message, theirs, name_of(theirs))
    error.param = None if error.param is None else name_of(error.param)
    return error


def _replaced(text: str, word: str, other: str) -> str:
    return re.sub(rf"(?<![\w.]){re.escape(word)}(?!\w)", lambda _: other, text)


def renamed(param: str, names: Mapping[str, str]) -> str:
    """`param`, a path such as `a.b[0].c`, with its longest beginning that is a key of `names` replaced."""
    parts = re.findall(r"[\w]+|\[\d+\]|\.", param)
    for end in range(len(parts), 0, -1):
        head = "".join(parts[:end])
        if head in names:
            return names[head] + "".join(parts[end:])
    return param
