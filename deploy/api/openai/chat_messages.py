"""The messages of a chat body, and its other inputs to the chat template."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ...errors import shorten
from ..schema import fields as schema_fields
from ..schema import hints
from ..schema.hints import nullable
from ..schema.relations import requires
from .tools import CalledTool

MAX_MESSAGES = 4096
MAX_CALLS = 4096  # of one turn

# Variables that a client may not set, as templates trust them: fields of the body, and how to render and tokenize.
# Which others the model's template reads, it says itself when it is rendered.
TRUSTED_KWARGS = ("messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize")
KWARG_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,63}$"
MAX_KWARGS = 64
MAX_KWARG_CHARS = 1024

NOT_OVER = requires(
    "continue_final_message", {"const": True}, "add_generation_prompt", False, ", as the last turn is continued"
)


def _content(value: Any, info: ValidationInfo) -> Any:
    """Validates `content`: text, or a list of text parts; optional in a turn of the assistant.

    A part of type refusal, which only an assistant's turn may hold, becomes text.
    """
    is_assistant = info.data.get("role") == "assistant"
    if isinstance(value, str) or (value is None and is_assistant):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("invalid_type", "must be text, or a list of parts of type text")
    if is_assistant:
        value = [_refusal_as_text(part) for part in value]
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" and isinstance(kind, str):
            raise PydanticCustomError(
                "unsupported_content_type",
                "part {i} is of type {kind}, but this model takes text parts only",
                {"i": i, "kind": repr(shorten(kind, 32))},
            )
        if kind != "text" or not isinstance(part.get("text"), str):
            raise PydanticCustomError("invalid_type", 'part {i} must be {"type": "text", "text": ...}', {"i": i})
    return [{"type": "text", "text": part["text"]} for part in value]


def _refusal_as_text(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return part


def _template_kwargs(value: dict[str, Any]) -> dict[str, Any]:
    if len(value) > MAX_KWARGS:
        raise PydanticCustomError("invalid_value", "must have at most {most} keys", {"most": MAX_KWARGS})
    for name, item in value.items():
        if name in TRUSTED_KWARGS or not re.fullmatch(KWARG_NAME, name):
            raise PydanticCustomError("invalid_value", "{name} cannot be set there", {"name": repr(shorten(name, 64))})
        if not isinstance(item, (str, int, float, bool, type(None))) or len(str(item)) > MAX_KWARG_CHARS:
            raise PydanticCustomError("invalid_value", "{name} must be a text, number or boolean", {"name": name})
    return value


TemplateKwargs = Annotated[
    dict[str, Any] | None,
    AfterValidator(lambda value: None if value is None else _template_kwargs(value)),
    WithJsonSchema(nullable(hints.scalars(KWARG_NAME, TRUSTED_KWARGS, MAX_KWARGS, MAX_KWARG_CHARS))),
]


# fields of a turn that other servers act on -> what to send here
_INSTEAD = {"function_call": "tool_calls instead", "prefix": "continue_final_message in the body instead"}


class Message(BaseModel):
    """One turn of a chat. An assistant's turn may be any answer of this server."""

    model_config = ConfigDict(strict=True, extra="ignore", json_schema_extra=schema_fields.content_or_assistant)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[CalledTool], Field(max_length=MAX_CALLS)] | None = None  # only with role = assistant
    content: Annotated[  # optional with role = assistant
        str | list[dict[str, str]] | None, BeforeValidator(_content), WithJsonSchema(hints.CONTENT)
    ]
    tool_call_id: str | None = Field(None, max_length=256)  # the call that this is the result of
    reasoning: str | None = None  # only with role = assistant: its reasoning before the content
    reasoning_content: str | None = None  # the same under its older name
    refusal: str | None = None  # only with role = assistant: its text instead of content
    name: str | None = Field(None, max_length=64)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        for name, right in _INSTEAD.items():
            if raw.get(name):
                raise PydanticCustomError(
                    "unsupported_parameter", "{name} is not supported; send {right}", {"name": name, "right": right}
                )
        is_open = raw.get("role") == "assistant" and "content" not in raw
        return {**raw, "content": None} if is_open else raw

    def for_template(self) -> dict[str, Any]:
        """The message as plain data for the chat template."""
        known = self.model_dump(exclude_none=True, exclude={"refusal"})
        if not self.tool_calls:
            known.pop("tool_calls", None)
            known["content"] = self.content or self.refusal or ""
        if thoughts := self.reasoning or self.reasoning_content:
            known["reasoning"] = known["reasoning_content"] = thoughts
        return known
