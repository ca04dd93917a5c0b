"""The shapes of answers of the APIs besides OpenAI's older ones: numbers, token ids, responses and messages.

As in `openai.py`, answers are made without these. Objects that belong to OpenAI or Anthropic and that grow with their
APIs say which fields are always there, and may have more.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from .openai import CompletionLogprobs, Count, FinishReason, PromptLogprobs, RequestMetrics, Shape, Usage


class OpenShape(BaseModel):
    """An object with at least these fields."""

    model_config = ConfigDict(extra="allow")


# -- embeddings, scores, reranking


class Embedding(Shape):
    """Of one input."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str  # base64 of little-endian float32, if that was asked for


class Numbers(Shape):
    """What answers have whose data are numbers."""

    id: str
    object: Literal["list"]
    created: Count
    model: str
    usage: Usage


class Embeddings(Numbers):
    """One for each input, in their order."""

    data: list[Embedding]


class Score(Shape):
    """Of one pair."""

    index: Count
    object: Literal["score"]
    score: float


class Scores(Numbers):
    """One for each pair, in their order."""

    data: list[Score]


class RankedText(Shape):
    """The document itself."""

    text: str


class Rank(Shape):
    """A document's; `index` is its place in the request."""

    index: Count
    relevance_score: float
    document: RankedText | None = None


class Ranks(Shape):
    """The documents that answer the query best, best first."""

    id: str
    model: str
    results: list[Rank]
    usage: Usage


# -- token ids


class TokensChoice(Shape):
    """How a prompt goes on, in token ids; in a stream, the new ones."""

    index: Count
    token_ids: list[Count]
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[Count] | None = None


class GeneratedTokens(Shape):
    """How the prompts go on, in token ids."""

    request_id: str
    id: str
    object: Literal["token_ids"]
    created: Count
    model: str
    choices: list[TokensChoice]
    usage: Usage
    system_fingerprint: str | None
    metrics: RequestMetrics | None = None


class GeneratedTokensChunk(OpenShape):
    """The data of an event of streamed token ids. After the last comes the text [DONE]."""

    id: str
    object: Literal["token_ids"]
    created: Count
    model: str
    choices: list[TokensChoice]


class RenderedPrompt(Shape):
    """A body for /generate, with the text of its token ids beside it."""

    request_id: str
    model: str
    token_ids: list[Count]
    prompt: str
    sampling_params: dict[str, Any]
    stream: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


class RenderedPrompts(RootModel[list[RenderedPrompt]]):
    """One for each prompt."""


# -- responses


class ResponseError(OpenShape):
    """Why a response failed."""

    code: str
    message: str


class OutputItem(OpenShape):
    """What was said, thought or called."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseUsage(OpenShape):
    """Tokens."""

    input_tokens: Count
    input_tokens_details: dict[str, Count]
    output_tokens: Count
    output_tokens_details: dict[str, Count]
    total_tokens: Count


class Response(OpenShape):
    """OpenAI's object: one answer, with what was asked for."""

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
    """The data of an event of a streamed response; its `type` is also the event's name."""

    type: str
    sequence_number: Count


class DeletedResponse(Shape):
    """It is not kept any more."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItem(OpenShape):
    """What was asked, or was answered before."""

    id: str
    type: Literal["message", "reasoning", "function_call", "function_call_output"]


class InputItems(Shape):
    """A page of them."""

    object: Literal["list"]
    data: list[InputItem]
    first_id: str
    last_id: str
    has_more: bool


# -- messages


class MessagesErrorInfo(Shape):
    """What went wrong, as Anthropic's clients know it."""

    type: str
    message: Annotated[str, Field(min_length=1)]


class MessagesError(Shape):
    """The body of every answer of this API that is an error."""

    type: Literal["error"]
    error: MessagesErrorInfo
    request_id: str


class ContentBlock(OpenShape):
    """What was said, thought or called."""

    type: Literal["text", "thinking", "tool_use"]


class MessageUsage(Shape):
    """Tokens; those from the cache are not among the input tokens."""

    input_tokens: Count
    cache_read_input_tokens: Count
    cache_creation_input_tokens: Count
    output_tokens: Count


class AnthropicMessage(Shape):
    """Anthropic's object: one answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(OpenShape):
    """The data of an event of a streamed message; its `type` is also the event's name."""

    type: str


class NumInputTokens(Shape):
    """Of a prompt."""

    input_tokens: Count
