"""Models of answers that several APIs share, for the OpenAPI document and for tests: errors, counts.

The server does not use these models: handlers make answers as plain data, and tests validate those. A field without a
default is in every answer.
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


class OpenShape(BaseModel):
    """An object with at least these fields."""

    model_config = ConfigDict(extra="allow")


class ErrorDetails(Shape):
    """The stage that refused a request for lack of capacity, or where its deadline passed, with its queue."""

    stage: str
    queue_depth: Count | None = None
    estimated_wait_s: Annotated[float, Field(ge=0)] | None = None
    engines: Count | None = None  # of a fleet, none of which has room; the queue is the shortest


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


class EngineOfFleet(Shape):
    """One of several engine processes. Its work is in tokens of prompts."""

    index: Count
    address: str | None  # of an engine elsewhere
    labels: dict[str, str]  # as `millrace engine --label`
    pid: Count | None
    state: Literal["ready", "loading", "draining", "dead"]
    reason: str | None  # why it takes no requests
    num_deaths: Count
    num_requests: Count
    work: Count
    num_expected_cached_tokens: Count  # of prompts, by the router, when they were sent there
