"""Models of what the answers of chat, completions and token ids share. Names are OpenAI's and vLLM's."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, RootModel

from ..schema.shapes import Count, FinishReason, Shape


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


class Generated(Shape):
    """The common fields of all answers and chunks."""

    id: str
    created: Count
    model: str
    metrics: RequestMetrics | None = None  # with return_metrics, or if the server always includes them


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
