"""Models of the answers to a chat, whole and streamed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..openai.shapes import Choice, Generated, Progress, PromptLogprobs, TokenDetails, Usage
from ..schema.shapes import Count, Shape


class TopLogprob(Shape):
    """A likely token and its log-probability."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class ChatLogprob(TopLogprob):
    """The chosen token, and the most likely ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    """Log-probabilities, one entry per token."""

    content: list[ChatLogprob]
    details: list[TokenDetails] | None = None  # with return_token_details


class CalledFunction(Shape):
    """The called function; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(Shape):
    """A call for the client to carry out."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Shape):
    """The answer. `content` is null if there are only tool calls or reasoning."""

    role: Literal["assistant"]
    content: str | None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the same text under its other name
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Choice):
    """One answer to a chat."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class FunctionDelta(Shape):
    """The function name, once, or a piece of the arguments."""

    name: str | None = None
    arguments: str


class ToolCallDelta(Shape):
    """The start of a tool call, or a piece of its arguments."""

    index: Count
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(Shape):
    """A piece of an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(Choice):
    """A piece of one choice."""

    delta: Delta
    logprobs: ChatLogprobs | None


class ChatCompletion(Generated):
    """The answer to a chat."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None
    prompt_token_ids: list[Count] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatCompletionChunk(Generated):
    """The data of one event of a streamed chat. The last event has the data [DONE]."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[Count] | None = None
    prompt_progress: Progress | None = None
