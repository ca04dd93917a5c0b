"""Models of the answers of the other APIs: pooling, token ids, Responses and Messages.

As in `openai.py`, the server does not use them. Objects defined by OpenAI or Anthropic name the fields that are always
present, and may have more.
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
    """The embedding of one input."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str  # with encoding_format base64: text of little-endian float32


class Numbers(Shape):
    """The common fields of embeddings and scores."""

    id: str
    object: Literal["list"]
    created: Count
    model: str
    usage: Usage


class Embeddings(Numbers):
    """Embeddings, one per input, in input order."""

    data: list[Embedding]


class Score(Shape):
    """The score of one pair."""

    index: Count
    object: Literal["score"]
    score: float


class Scores(Numbers):
    """Scores, one per pair, in input order."""

    data: list[Score]


class RankedText(Shape):
    """The text of a document."""

    text: str


class Rank(Shape):
    """The relevance of one document; `index` is its position in the request."""

    index: Count
    relevance_score: float
    document: RankedText | None = None


class Ranks(Shape):
    """Documents in order of relevance, best first."""

    id: str
    model: str
    results: list[Rank]
    usage: Usage


# -- token ids


class TokensChoice(Shape):
    """A completion in token ids; in a stream, the new token ids."""

    index: Count
    token_ids: list[Count]
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[Count] | None = None


class GeneratedTokens(Shape):
    """The completions of the prompts, in token ids."""

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
    """The data of one event of streamed token ids. The last event has the data [DONE]."""

    id: str
    object: Literal["token_ids"]
    created: Count
    model: str
    choices: list[TokensChoice]


class RenderedPrompt(Shape):
    """A body for /generate, with the text of its token ids."""

    request_id: str
    model: str
    token_ids: list[Count]
    prompt: str
    sampling_params: dict[str, Any]
    stream: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


class RenderedPrompts(RootModel[list[RenderedPrompt]]):
    """Bodies for /generate, one per prompt."""


# -- responses


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


# -- messages


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
