"""Models of messages and their events. Anthropic's objects name the fields that are always present."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..schema.shapes import Count, OpenShape, Shape


class MessagesErrorInfo(Shape):
    """The description of an error, in Anthropic's format."""

    type: str
    message: Annotated[str, Field(min_length=1)]


class MessagesError(Shape):
    """The body of every error answer of the Messages API."""

    type: Literal["error"]
    error: MessagesErrorInfo
    request_id: str


class ContentBlock(OpenShape):
    """Text, reasoning or a tool call."""

    type: Literal["text", "thinking", "tool_use"]


class MessageUsage(Shape):
    """Token counts of a message; `input_tokens` excludes cached tokens."""

    input_tokens: Count
    cache_read_input_tokens: Count
    cache_creation_input_tokens: Count
    output_tokens: Count


class AnthropicMessage(Shape):
    """Anthropic's message object: one answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(OpenShape):
    """The data of one event of a streamed message; `type` is also the event's name."""

    type: str


class NumInputTokens(Shape):
    """The number of tokens of a prompt."""

    input_tokens: Count
