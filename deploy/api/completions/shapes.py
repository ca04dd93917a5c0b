"""Models of completions, whole and streamed."""

from __future__ import annotations

from typing import Literal

from ..openai.shapes import Choice, CompletionLogprobs, Generated, Progress, PromptLogprobs, Usage
from ..schema.shapes import Count


class CompletionChoice(Choice):
    """A completion of a prompt; in a stream, a piece of it."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[Count] | None = None
    prompt_logprobs: PromptLogprobs | None = None


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
