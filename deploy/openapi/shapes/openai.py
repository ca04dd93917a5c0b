"""Models of answers for the OpenAPI document and for tests.

The server does not use them: `deploy/api/openai/answers.py` and the handlers make answers as plain data, and tests
validate those. A field without a default is in every answer. Names are OpenAI's and vLLM's.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...errors import CODES, MAX_MESSAGE_CHARS

Count = Annotated[int, Field(ge=0)]
FinishReason = Literal["stop", "length", "abort", "tool_calls"]


class Shape(BaseModel):
    """An object with exactly these fields."""

    model_config = ConfigDict(extra="forbid")


# -- errors


class ErrorDetails(Shape):
    """The stage that refused a request for lack of capacity, or where its deadline passed, with its queue."""

    stage: str
    queue_depth: Count | None = None
    estimated_wait_s: Annotated[float, Field(ge=0)] | None = None


class ErrorInfo(Shape):
    """The description of an error."""

    message: Annotated[str, Field(min_length=1, max_length=MAX_MESSAGE_CHARS)]
    type: Annotated[str, Field(json_schema_extra={"enum": sorted({kind for _, kind in CODES.values()})})]
    param: str | None  # the field at fault
    code: Annotated[str, Field(json_schema_extra={"enum": sorted(CODES)})]
    details: ErrorDetails | None = None


class Error(Shape):
    """The body of every error answer, and the data of the event before [DONE] in a failed stream."""

    error: ErrorInfo


# -- generation


class CachedTokens(Shape):
    """Prompt tokens from the prefix cache."""

    cached_tokens: Count


class ThoughtTokens(Shape):
    """Completion tokens of the reasoning."""

    reasoning_tokens: Count


class Usage(Shape):
    """Token counts of all prompts and all choices."""

    prompt_tokens: Count
    total_tokens: Count
    completion_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ThoughtTokens | None = None  # only for models with reasoning


class PromptLogprob(Shape):
    """The log-probability of one token at a position of the prompt."""

    logprob: float
    rank: Count
    decoded_token: str


# one entry per token: token id -> log-probability of the token and the most likely ones; null for the first token
PromptLogprobs = list[dict[str, PromptLogprob] | None]
RequestMetrics = dict[str, float | int | dict[str, float | None] | None]  # times in ms, counts, times by stage


class Progress(Shape):
    """Progress of the prefill, in tokens."""

    total: Count
    cached: Count
    cache: Count
    processed: Count
    time_ms: Annotated[float, Field(ge=0)]


class TopLogprob(Shape):
    """A likely token and its log-probability."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class ChatLogprob(TopLogprob):
    """The chosen token, and the most likely ones."""

    top_logprobs: list[TopLogprob]


class LikelyToken(Shape):
    """A likely token with its id."""

    token_id: Count
    token: str
    logprob: float


class TokenDetails(Shape):
    """What the engine knows of a token of the answer."""

    token_id: Count
    token: str  # the text it added
    rank: Count
    time_ms: Annotated[float, Field(ge=0)]  # from the arrival of the request until it became text
    is_drafted: bool  # an accepted draft of speculative decoding
    top: list[LikelyToken]


class ChatLogprobs(Shape):
    """Log-probabilities, one entry per token."""

    content: list[ChatLogprob]
    details: list[TokenDetails] | None = None  # with return_token_details


class CompletionLogprobs(Shape):
    """Log-probabilities as parallel lists, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null for the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]
    details: list[TokenDetails] | None = None  # with return_token_details; none for an echoed prompt


class Choice(Shape):
    """The common fields of all choices."""

    index: Count
    finish_reason: FinishReason | None
    stop_reason: str | int | None  # the stop string or token id that ended it
    token_ids: list[Count] | None = None  # with return_token_ids


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


class CompletionChoice(Choice):
    """A completion of a prompt; in a stream, a piece of it."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[Count] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Generated(Shape):
    """The common fields of all answers and chunks."""

    id: str
    created: Count
    model: str
    metrics: RequestMetrics | None = None  # with return_metrics, or if the server always includes them


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


class Completion(Generated):
    """The completions of the prompts."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str | None


class CompletionChunk(Generated):
    """The data of one event of a streamed completion. The last event has the data [DONE]."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None
    prompt_progress: Progress | None = None


# -- token ids, and the end of a request


class Tokens(Shape):
    """The token ids of a prompt."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class DetokenizedText(Shape):
    """The text of token ids."""

    prompt: str


class Aborted(Shape):
    """An aborted request."""

    id: str
    aborted: Literal[True]
