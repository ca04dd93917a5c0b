"""Models of responses and their events. OpenAI's objects name the fields that are always present, and may have more."""

from __future__ import annotations

from typing import Any, Literal

from ..schema.shapes import Count, OpenShape, Shape


class ResponseError(OpenShape):
    """The reason of a failed response."""

    code: str
    message: str


class OutputItem(OpenShape):
    """A message, the reasoning or a function call."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseUsage(OpenShape):
    """Token counts of a response."""

    input_tokens: Count
    input_tokens_details: dict[str, Count]
    output_tokens: Count
    output_tokens_details: dict[str, Count]
    total_tokens: Count


class Response(OpenShape):
    """OpenAI's response object: one answer, with the parameters of its request."""

    id: str
    object: Literal["response"]
    created_at: Count
    completed_at: Count | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    background: bool
    error: ResponseError | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None


class ResponseEvent(OpenShape):
    """The data of one event of a streamed response; `type` is also the event's name."""

    type: str
    sequence_number: Count


class DeletedResponse(Shape):
    """A deleted response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItem(OpenShape):
    """An input item, or an item of a previous response."""

    id: str
    type: Literal["message", "reasoning", "function_call", "function_call_output"]


class InputItems(Shape):
    """A page of input items."""

    object: Literal["list"]
    data: list[InputItem]
    first_id: str
    last_id: str
    has_more: bool
