"""Every operation of the API in one table: method, path, what goes in, what comes out, and whose key opens it.

The OpenAPI document is made from it, and a test holds it to the routes of the server: a new route takes a new entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from . import shapes
from .bodies import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from .errors import CODES
from .metrics import CONTENT_TYPE

Access = Literal["open", "key", "admin"]

# what an operation may answer besides its own errors
ALWAYS = (
    "bad_request",
    "host_not_allowed",
    "origin_not_allowed",
    "expectation_failed",
    "headers_too_large",
    "internal_error",
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
WITH_ENGINE = ("dead", "draining", "loading")
WITH_MODEL = ("model_not_found",)
WITH_CHAT = ("empty_prompt", "template_limit", "tokenizer_error", "unsupported_content_type")
GENERATING = (
    *WITH_CHAT,
    "context_length_exceeded",
    "detokenizer_error",
    "rate_limit_exceeded",
    "unsupported_parameter",
)


@dataclass(frozen=True, slots=True)
class Content:
    """One form of an answer. `event` is the model of the data of a stream's events."""

    shape: type[BaseModel] | None = None  # None: text
    content_type: str = "application/json"
    event: type[BaseModel] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A method on a path. `answers` are those that are no error, by status; `errors` are codes of `errors.CODES`."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    name: str
    group: str
    summary: str
    answers: Mapping[int, tuple[Content, ...]]
    body: type[Body] | None = None
    access: Access = "key"
    errors: tuple[str, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)  # of the path -> what it is
    links: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # OpenAPI links of its 200

    def codes_by_status(self, has_keys: bool) -> dict[int, list[str]]:
        """Codes of errors that it may answer with, by HTTP status."""
        codes = {*ALWAYS, *self.errors}
        if self.body is not None:
            codes.update(WITH_BODY)
        if self.access == "admin" or (self.access == "key" and has_keys):
            codes.update(WITH_KEY)
        found: dict[int, list[str]] = {}
        for code in sorted(codes):
            found.setdefault(CODES[code][0], []).append(code)
        return found


def _json(shape: type[BaseModel]) -> dict[int, tuple[Content, ...]]:
    return {200: (Content(shape),)}


def _json_or_events(shape: type[BaseModel], event: type[BaseModel]) -> dict[int, tuple[Content, ...]]:
    return {200: (Content(shape), Content(content_type="text/event-stream", event=event))}


READY: dict[int, tuple[Content, ...]] = {200: (Content(shapes.Ready),), 503: (Content(shapes.NotReady),)}

ABORT = {"abort": {"operationId": "abortRequest", "parameters": {"id": "$response.header.X-Request-Id"}}}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        name="createChatCompletion",
        group="generation",
        summary="The answer to a chat, whole or as a stream",
        body=ChatBody,
        answers=_json_or_events(shapes.ChatCompletion, shapes.ChatCompletionChunk),
        errors=(*WITH_ENGINE, *WITH_MODEL, *GENERATING),
        links=ABORT,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        name="createCompletion",
        group="generation",
        summary="How one prompt or several go on, whole or as a stream",
        body=CompletionBody,
        answers=_json_or_events(shapes.Completion, shapes.CompletionChunk),
        errors=(*WITH_ENGINE, *WITH_MODEL, *GENERATING),
        links=ABORT,
    ),
    Operation(
        method="DELETE",
        path="/v1/requests/{id}",
        name="abortRequest",
        group="generation",
        summary="End a request that is under way; its client gets what there is, with finish_reason abort",
        parameters={"id": "the id of its answer, or its X-Request-Id"},
        answers=_json(shapes.Aborted),
        errors=("request_not_found",),
    ),
    Operation(
        method="GET",
        path="/v1/models",
        name="listModels",
        group="models",
        summary="The names that are served",
        answers=_json(shapes.Models),
        errors=WITH_ENGINE,
        links={"model": {"operationId": "getModel", "parameters": {"id": "$response.body#/data/0/id"}}},
    ),
    Operation(
        method="GET",
        path="/v1/models/{id}",
        name="getModel",
        group="models",
        summary="One of them",
        parameters={"id": "the name"},
        answers=_json(shapes.Model),
        errors=(*WITH_ENGINE, *WITH_MODEL),
    ),
    Operation(
        method="POST",
        path="/tokenize",
        name="tokenize",
        group="tokens",
        summary="Token ids of a prompt or a chat",
        body=TokenizeBody,
        answers=_json(shapes.Tokens),
        errors=(*WITH_ENGINE, *WITH_MODEL, *WITH_CHAT),
        links={"text": {"operationId": "detokenize", "requestBody": {"tokens": "$response.body#/tokens"}}},
    ),
    Operation(
        method="POST",
        path="/detokenize",
        name="detokenize",
        group="tokens",
        summary="The text of token ids",
        body=DetokenizeBody,
        answers=_json(shapes.Text),
        errors=(*WITH_ENGINE, *WITH_MODEL, "tokenizer_error"),
    ),
    Operation(
        method="GET",
        path="/health",
        name="health",
        group="server",
        summary="Whether a request would be taken; same as /health/ready",
        access="open",
        answers=READY,
    ),
    Operation(
        method="GET",
        path="/health/live",
        name="healthLive",
        group="server",
        summary="Whether the process answers",
        access="open",
        answers=_json(shapes.Alive),
    ),
    Operation(
        method="GET",
        path="/health/ready",
        name="healthReady",
        group="server",
        summary="Whether a request would be taken; if not, why, and which stage is to blame",
        access="open",
        answers=READY,
    ),
    Operation(
        method="GET",
        path="/version",
        name="version",
        group="server",
        summary="The version of millrace",
        answers=_json(shapes.Version),
    ),
    Operation(
        method="GET",
        path="/server_info",
        name="serverInfo",
        group="server",
        summary="The model, the settings, the memory table and the blocks by state",
        answers=_json(shapes.ServerInfo),
        errors=WITH_ENGINE,
    ),
    Operation(
        method="GET",
        path="/metrics",
        name="metrics",
        group="server",
        summary="Metrics in Prometheus' text format",
        answers={200: (Content(content_type=CONTENT_TYPE),)},
    ),
    Operation(
        method="GET",
        path="/openapi.json",
        name="openapi",
        group="server",
        summary="This document",
        answers={200: (Content(shapes.Document),)},
    ),
    Operation(
        method="GET",
        path="/docs",
        name="docs",
        group="server",
        summary="This document as a page, complete in one file",
        answers={200: (Content(content_type="text/html; charset=utf-8"),)},
    ),
    Operation(
        method="POST",
        path="/admin/cache/reset",
        name="resetCache",
        group="admin",
        summary="Forget every cached prefix; requests under way go on",
        access="admin",
        answers=_json(shapes.CacheReset),
        errors=WITH_ENGINE,
    ),
)
