"""Models of completions in token ids, whole and streamed."""

from __future__ import annotations

from typing import Literal

from ..openai.shapes import CompletionLogprobs, PromptLogprobs, RequestMetrics, Usage
from ..schema.shapes import Count, FinishReason, OpenShape, Shape


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
