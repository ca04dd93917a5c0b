"""The type of a table entry, helpers for its answers, and groups of error codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel

from ...errors import CODES
from .body import Body
from .hints import Schema
from .shapes import Error

Access = Literal["open", "key", "admin"]


@dataclass(frozen=True, slots=True)
class Content:
    """One format of an answer. `event` is the model of the data of a stream's events."""

    shape: type[BaseModel] | None = None  # None: text
    content_type: str = "application/json"
    event: type[BaseModel] | None = None
    is_named: bool = False  # events have names, and the stream has no [DONE]
    line: type[BaseModel] | None = None  # the model of each line of a stream of JSON lines


Answers = Mapping[int, tuple[Content, ...]]  # by HTTP status, without errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A method on a path. `errors` are codes of `errors.CODES` besides those common to operations of its kind."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    name: str
    group: str
    summary: str
    answers: Answers
    body: type[Body] | None = None
    access: Access = "key"
    errors: tuple[str, ...] = ()
    error: type[BaseModel] = Error
    parameters: Mapping[str, str] = field(default_factory=dict)  # path parameter -> its description
    query: Mapping[str, Schema] = field(default_factory=dict)  # name -> its schema
    links: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # OpenAPI links of its 200

    def codes_by_status(self, has_keys: bool) -> dict[int, list[str]]:
        """All error codes of the operation, by HTTP status."""
        codes = {*ALWAYS, *self.errors}
        if self.body is not None:
            codes.update(WITH_BODY)
        if self.access == "admin" or (self.access == "key" and has_keys):
            codes.update(WITH_KEY)
        found: dict[int, list[str]] = {}
        for code in sorted(codes):
            found.setdefault(CODES[code][0], []).append(code)
        return found


def again(operation: Operation, **paths: str) -> tuple[Operation, ...]:
    """The same operation under more paths; the keywords are its names there."""
    return tuple(replace(operation, name=name, path=path) for name, path in paths.items())


# -- formats of answers


def json(shape: type[BaseModel]) -> Answers:
    return {200: (Content(shape),)}


def json_or_events(shape: type[BaseModel], event: type[BaseModel]) -> Answers:
    return {200: (Content(shape), Content(content_type="text/event-stream", event=event))}


def json_or_named_events(shape: type[BaseModel], event: type[BaseModel]) -> Answers:
    return {200: (Content(shape), Content(content_type="text/event-stream", event=event, is_named=True))}


def json_or_lines(shape: type[BaseModel], line: type[BaseModel]) -> Answers:
    return {200: (Content(shape), Content(content_type="application/x-ndjson", line=line))}


def text(content_type: str) -> Answers:
    return {200: (Content(content_type=content_type),)}


PAGE = text("text/html; charset=utf-8")
SOCKET: Answers = {101: ()}

# a link of answers that have an id
ABORT = {"abort": {"operationId": "abortRequest", "parameters": {"id": "$response.header.X-Request-Id"}}}

# -- errors of every operation, and of those with a key or a body

ALWAYS = (
    "bad_request",
    "host_not_allowed",
    "origin_not_allowed",
    "expectation_failed",
    "headers_too_large",
    "internal_error",
    "out_of_resources",
    "request_timeout",
    "too_many_connections",
)
WITH_KEY = ("invalid_api_key",)
WITH_BODY = (
    "body_too_large",
    "invalid_json",
    "invalid_type",
    "invalid_value",
    "missing_required_parameter",
    "unknown_parameter",
    "unsupported_media_type",
)

# -- errors by what an operation needs; each group includes those before it

ENGINE_ERRORS = ("dead", "draining", "loading", "stalled")
MODEL_ERRORS = (*ENGINE_ERRORS, "model_not_found")
CHAT_ERRORS = (*MODEL_ERRORS, "empty_prompt", "template_limit", "tokenizer_error", "unsupported_content_type")
GENERATION_ERRORS = (
    *CHAT_ERRORS,
    "adapter_load_failed",
    "context_length_exceeded",
    "deadline_exceeded",
    "detokenizer_error",
    "engine_died",
    "engine_version",
    "model_error",
    "rate_limit_exceeded",
    "unsupported_parameter",
    "unsupported_task",
)
POOLING_ERRORS = (
    *MODEL_ERRORS,
    "cancelled",
    "context_length_exceeded",
    "empty_prompt",
    "engine_died",
    "engine_version",
    "model_error",
    "rate_limit_exceeded",
    "tokenizer_error",
    "unsupported_parameter",
    "unsupported_task",
)
