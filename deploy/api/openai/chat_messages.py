"""The messages of a chat body, and its other inputs to the chat template."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

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

from ...errors import ApiError, shorten
from ..schema import fields as documented_forms
from ..schema import hints as documented
from ..schema.hints import nullable, only_with
from .tools import MAX_TOOLS, CalledTool

MAX_MESSAGES = 4096

# Variables that a client may set. Never those that a template trusts: its own text, tools, or how to tokenize.
TEMPLATE_KWARGS = frozenset({"enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "date_string"})
MAX_KWARG_CHARS = 1024

NOT_OVER = only_with("continue_final_message", {"const": True}, {"add_generation_prompt": False})


def _content(value: Any, info: ValidationInfo) -> Any:
    """Validates `content`: text, or a list of text parts; optional in a turn with tool calls."""
    if isinstance(value, str) or (value is None and info.data.get("tool_calls")):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("invalid_type", "must be text, or a list of parts of type text")
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


def _template_kwargs(value: dict[str, Any]) -> dict[str, Any]:
    for name, item in value.items():
        if name not in TEMPLATE_KWARGS:
            known = ", ".join(sorted(TEMPLATE_KWARGS))
            raise PydanticCustomError(
                "invalid_value", "{name} must be one of {known}", {"name": repr(shorten(name, 64)), "known": known}
            )
        if not isinstance(item, (str, int, float, bool, type(None))) or len(str(item)) > MAX_KWARG_CHARS:
            raise PydanticCustomError("invalid_value", "{name} must be a text, number or boolean", {"name": name})
    return value


TemplateKwargs = Annotated[
    dict[str, Any] | None,
    AfterValidator(lambda value: None if value is None else _template_kwargs(value)),
    WithJsonSchema(nullable(documented.scalars(TEMPLATE_KWARGS, MAX_KWARG_CHARS))),
]


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(strict=True, extra="ignore", json_schema_extra=documented_forms.content_or_calls)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[CalledTool], Field(max_length=MAX_TOOLS)] | None = None  # only with role = assistant
    content: Annotated[  # optional with tool_calls
        str | list[dict[str, str]] | None, BeforeValidator(_content), WithJsonSchema(documented.CONTENT)
    ]
    tool_call_id: str | None = Field(None, max_length=256)  # the call that this is the result of
    reasoning: str | None = None  # only with role = assistant: its reasoning before the content
    reasoning_content: str | None = None  # the same under its older name
    name: str | None = Field(None, max_length=64)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, raw: Any) -> Any:
        has_calls = isinstance(raw, dict) and raw.get("tool_calls") and "content" not in raw
        return {**raw, "content": None} if has_calls else raw

    def for_template(self) -> dict[str, Any]:
        """The message as plain data for the chat template."""
        known = self.model_dump(exclude_none=True)
        if thoughts := self.reasoning or self.reasoning_content:
            known["reasoning"] = known["reasoning_content"] = thoughts
        return known


class Continued(Protocol):
    """The fields that say how the last turn of a chat ends."""

    continue_final_message: bool
    add_generation_prompt: bool


def check_last_turn(body: Continued) -> None:
    """Raises `ApiError` if a body asks both to continue the last turn and to open a new one."""
    if body.continue_final_message and body.add_generation_prompt:
        message = "continue_final_message: requires add_generation_prompt = false, as the last turn is continued"
        raise ApiError("invalid_value", message, param="continue_final_message")
