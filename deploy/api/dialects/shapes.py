"""Models of the answers of TGI's routes. As with `schema/shapes.py`, the server does not use them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ...errors import MAX_MESSAGE_CHARS
from ..schema.shapes import Count, Shape


class TgiError(Shape):
    """An error in TGI's shape."""

    error: Annotated[str, Field(min_length=1, max_length=MAX_MESSAGE_CHARS)]
    error_type: Literal["validation", "overloaded", "generation"]


class TgiToken(Shape):
    """One token."""

    id: Count
    text: str
    logprob: float
    special: bool


class TgiStreamDetails(Shape):
    """How an answer ended."""

    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: Count
    input_length: Count
    seed: Count | None


class TgiEvent(Shape):
    """One token of a streamed answer; the last has all of the text, too."""

    index: Count
    token: TgiToken
    top_tokens: list[TgiToken] | None = None
    generated_text: str | None
    details: TgiStreamDetails | None


class TgiInfo(Shape):
    """The model and its limits."""

    model_id: str
    model_sha: None
    model_dtype: str
    model_device_type: str
    model_pipeline_tag: Literal["text-generation"]
    max_concurrent_requests: Count
    max_best_of: Count
    max_stop_sequences: Count
    max_input_tokens: Count
    max_total_tokens: Count
    router: str
    version: str
