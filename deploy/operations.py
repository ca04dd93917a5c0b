"""Every operation of the API in one table: method, path, what goes in, what comes out, and whose key opens it.

The OpenAPI document is made from it, and a test holds it to the routes of the server: a new route takes a new entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel

from . import api_shapes, inside_shapes, shapes
from .bodies import Body, ChatBody, CompletionBody
from .documented import Schema
from .embedding_bodies import EmbeddingBody, RerankBody, ScoreBody
from .errors import CODES
from .inside import MAX_CURSOR, MAX_LISTED
from .messages_bodies import CountTokensBody, MessagesBody
from .messages_events import MESSAGES_PATH
from .metrics import CONTENT_TYPE
from .native import GenerateBody
from .profiler import DEFAULT_S as PROFILER_S
from .profiler import MAX_S as PROFILER_MAX_S
from .responses_bodies import ResponsesBody
from .responses_routes import MAX_ITEMS_LISTED
from .token_bodies import DetokenizeBody, TokenizeBody

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
WITH_ENGINE = ("dead", "draining", "loading", "stalled")
WITH_MODEL = ("model_not_found",)
WITH_CHAT = ("empty_prompt", "template_limit", "tokenizer_error", "unsupported_content_type")
GENERATING = (
    *WITH_CHAT,
    "context_length_exceeded",
    "deadline_exceeded",
    "detokenizer_error",
    "rate_limit_exceeded",
    "unsupported_parameter",
    "unsupported_task",
)
POOLING = (
    "cancelled",
    "context_length_exceeded",
    "empty_prompt",
    "rate_limit_exceeded",
    "tokenizer_error",
    "unsupported_parameter",
    "unsupported_task",
)


@dataclass(frozen=True, slots=True)
class Content:
    """One form of an answer. `event` is the model of the data of a stream's events."""

    shape: type[BaseModel] | None = None  # None: text
    content_type: str = "application/json"
    event: type[BaseModel] | None = None
    is_named: bool = False  # events have names, and none says [DONE]


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
    error: type[BaseModel] = shapes.Error
    parameters: Mapping[str, str] = field(default_factory=dict)  # of the path -> what it is
    query: Mapping[str, Schema] = field(default_factory=dict)  # name -> its schema
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


def _json_or_named_events(shape: type[BaseModel], event: type[BaseModel]) -> dict[int, tuple[Content, ...]]:
    return {200: (Content(shape), Content(content_type="text/event-stream", event=event, is_named=True))}


READY: dict[int, tuple[Content, ...]] = {200: (Content(shapes.Ready),), 503: (Content(shapes.NotReady),)}

ABORT = {"abort": {"operationId": "abortRequest", "parameters": {"id": "$response.header.X-Request-Id"}}}

STORED = {"id": "the id of the response"}


def _again(operation: Operation, **paths: str) -> tuple[Operation, ...]:
    """The same operation under more paths, each with a name of its own."""
    return tuple(replace(operation, name=name, path=path) for name, path in paths.items())


SCORE = Operation(
    method="POST",
    path="/score",
    name="score",
    group="numbers",
    summary="How well texts go together: one query with all documents, or one with one",
    body=ScoreBody,
    answers=_json(api_shapes.Scores),
    errors=(*WITH_ENGINE, *WITH_MODEL, *POOLING),
)
RERANK = Operation(
    method="POST",
    path="/rerank",
    name="rerank",
    group="numbers",
    summary="The documents that answer a query best, best first",
    body=RerankBody,
    answers=_json(api_shapes.Ranks),
    errors=(*WITH_ENGINE, *WITH_MODEL, *POOLING),
)
GENERATE = Operation(
    method="POST",
    path="/generate",
    name="generate",
    group="tokens",
    summary="How token ids go on, in token ids, whole or as a stream",
    body=GenerateBody,
    answers=_json_or_events(api_shapes.GeneratedTokens, api_shapes.GeneratedTokensChunk),
    errors=(*WITH_ENGINE, *WITH_MODEL, *GENERATING),
)
NUMBERS = (
    Operation(
        method="POST",
        path="/v1/embeddings",
        name="createEmbeddings",
        group="numbers",
        summary="A vector for each text",
        body=EmbeddingBody,
        answers=_json(api_shapes.Embeddings),
        errors=(*WITH_ENGINE, *WITH_MODEL, *POOLING),
    ),
    SCORE,
    *_again(SCORE, scoreV1="/v1/score"),
    RERANK,
    *_again(RERANK, rerankV1="/v1/rerank", rerankV2="/v2/rerank"),
)
TOKENS = (
    GENERATE,
    *_again(GENERATE, inferenceGenerate="/inference/v1/generate"),
    Operation(
        method="POST",
        path="/v1/chat/completions/render",
        name="renderChatCompletion",
        group="tokens",
        summary="The body for /generate that a chat stands for, with nothing computed",
        body=ChatBody,
        answers=_json(api_shapes.RenderedPrompt),
        errors=(*WITH_ENGINE, *WITH_MODEL, *GENERATING),
    ),
    Operation(
        method="POST",
        path="/v1/completions/render",
        name="renderCompletion",
        group="tokens",
        summary="The bodies for /generate that the prompts stand for, with nothing computed",
        body=CompletionBody,
        answers=_json(api_shapes.RenderedPrompts),
        errors=(*WITH_ENGINE, *WITH_MODEL, *GENERATING),
    ),
)
RESPONSES = (
    Operation(
        method="POST",
        path="/v1/responses",
        name="createResponse",
        group="responses",
        summary="A response, whole, as a stream or in the background",
        body=ResponsesBody,
        answers=_json_or_named_events(api_shapes.Response, api_shapes.ResponseEvent),
        errors=(*WITH_ENGINE, *WITH_MODEL, *GENERATING, "response_not_found"),
    ),
    Operation(
        method="GET",
        path="/v1/responses",
        name="responsesSocket",
        group="sockets",
        summary="A WebSocket on which responses are asked for, one after the other; 426 without an upgrade",
        answers={101: ()},
        errors=(*WITH_ENGINE, "upgrade_required"),
    ),
    Operation(
        method="GET",
        path="/v1/responses/{id}",
        name="getResponse",
        group="responses",
        summary="A response that is kept, or the events that it is made by",
        parameters=STORED,
        query={
            "stream": {
                "type": "string",
                "enum": ["true", "false"],
                "description": "events; of one made with background and stream",
            },
            "starting_after": {
                "type": "integer",
                "minimum": 0,
                "maximum": 2**31 - 1,
                "description": "the sequence number of the last event that is known",
            },
        },
        answers=_json_or_named_events(api_shapes.Response, api_shapes.ResponseEvent),
        errors=(*WITH_ENGINE, "response_not_found", "invalid_value"),
    ),
    Operation(
        method="DELETE",
        path="/v1/responses/{id}",
        name="deleteResponse",
        group="responses",
        summary="Keep a response no longer; one that is being made ends",
        parameters=STORED,
        answers=_json(api_shapes.DeletedResponse),
        errors=("response_not_found",),
    ),
    Operation(
        method="POST",
        path="/v1/responses/{id}/cancel",
        name="cancelResponse",
        group="responses",
        summary="End a response that is made in the background",
        parameters=STORED,
        answers=_json(api_shapes.Response),
        errors=("response_not_found", "invalid_value"),
    ),
    Operation(
        method="GET",
        path="/v1/responses/{id}/input_items",
        name="listInputItems",
        group="responses",
        summary="What a response answered, with all that it went on from",
        parameters=STORED,
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS_LISTED, "default": 20},
            "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
            "after": {"type": "string", "description": "the id of the last item that is known"},
        },
        answers=_json(api_shapes.InputItems),
        errors=(*WITH_ENGINE, "response_not_found", "invalid_value"),
    ),
)
MESSAGES = (
    Operation(
        method="POST",
        path=MESSAGES_PATH,
        name="createMessage",
        group="messages",
        summary="A message of Anthropic's API, whole or as a stream",
        body=MessagesBody,
        answers=_json_or_named_events(api_shapes.AnthropicMessage, api_shapes.MessageEvent),
        error=api_shapes.MessagesError,
        errors=(*WITH_ENGINE, *WITH_MODEL, *GENERATING),
    ),
    Operation(
        method="POST",
        path=f"{MESSAGES_PATH}/count_tokens",
        name="countMessageTokens",
        group="messages",
        summary="How many tokens the prompt of a message has",
        body=CountTokensBody,
        answers=_json(api_shapes.NumInputTokens),
        error=api_shapes.MessagesError,
        errors=(*WITH_ENGINE, *WITH_MODEL, *WITH_CHAT, "context_length_exceeded", "unsupported_parameter"),
    ),
)
PAGES = (
    Operation(
        method="GET",
        path="/v1/stream",
        name="streamSocket",
        group="sockets",
        summary="A WebSocket with any number of streams at a time; 426 without an upgrade",
        answers={101: ()},
        errors=(*WITH_ENGINE, "upgrade_required"),
    ),
    Operation(
        method="GET",
        path="/stream-demo",
        name="streamDemo",
        group="server",
        summary="A page that shows several answers over one WebSocket",
        access="open",
        answers={200: (Content(content_type="text/html; charset=utf-8"),)},
    ),
    Operation(
        method="GET",
        path="/dashboard",
        name="dashboard",
        group="server",
        summary="A page that shows live what the engine does",
        access="open",
        answers={200: (Content(content_type="text/html; charset=utf-8"),)},
    ),
    Operation(
        method="GET",
        path="/dashboard/feed",
        name="dashboardFeed",
        group="sockets",
        summary="A WebSocket with what that page shows; its first message brings the key; 426 without an upgrade",
        access="open",
        answers={101: ()},
        errors=("upgrade_required",),
    ),
    Operation(
        method="GET",
        path="/static/{name}",
        name="staticFile",
        group="server",
        summary="A file of those pages",
        access="open",
        parameters={"name": "its name, with folders"},
        answers={200: (Content(content_type="text/*"),)},
        errors=("not_found",),
    ),
)

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
        path="/v1/requests",
        name="listRequests",
        group="server",
        summary="The requests under way, oldest first: those of the API key, or with the admin key all; no text",
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": MAX_LISTED},
            "cursor": {"type": "integer", "minimum": 0, "maximum": MAX_CURSOR, "default": 0},
        },
        answers=_json(inside_shapes.Requests),
        errors=(*WITH_ENGINE, "invalid_value"),
    ),
    Operation(
        method="GET",
        path="/v1/requests/{id}/explain",
        name="explainRequest",
        group="server",
        summary="Where the time of a request went, under way or just ended: its waterfall, and the causes in words",
        parameters={"id": "the id of its answer, or its X-Request-Id"},
        answers=_json(inside_shapes.Explanation),
        errors=(*WITH_ENGINE, "request_not_found"),
    ),
    Operation(
        method="GET",
        path="/v1/stages",
        name="stages",
        group="server",
        summary="Each stage's time idle, busy and blocked, how full each edge is, and what limits the pipeline",
        answers=_json(inside_shapes.Stages),
        errors=WITH_ENGINE,
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
        path="/load",
        name="load",
        group="server",
        summary="How much is under way and waits, for a load balancer",
        answers=_json(shapes.Load),
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
    Operation(
        method="GET",
        path="/admin/trace",
        name="trace",
        group="admin",
        summary="The last seconds of the trace, to be opened at ui.perfetto.dev",
        access="admin",
        query={"seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": 3600, "default": 30}},
        answers=_json(shapes.TraceEvents),
        errors=(*WITH_ENGINE, "invalid_value"),
    ),
    Operation(
        method="POST",
        path="/admin/flight",
        name="recordFlight",
        group="admin",
        summary="Write the last seconds of the trace, stacks and queues to a file at the server",
        access="admin",
        answers=_json(shapes.FlightFile),
        errors=(*WITH_ENGINE, "no_flight_recorder"),
    ),
    Operation(
        method="POST",
        path="/admin/profiler/start",
        name="startProfiler",
        group="admin",
        summary="Open a window of torch's profiler; it closes by itself after `seconds`",
        access="admin",
        query={"seconds": {"type": "integer", "minimum": 1, "maximum": PROFILER_MAX_S, "default": PROFILER_S}},
        answers=_json(shapes.ProfilerStarted),
        errors=(*WITH_ENGINE, "no_profiler", "profiler_busy", "invalid_value"),
    ),
    Operation(
        method="POST",
        path="/admin/profiler/stop",
        name="stopProfiler",
        group="admin",
        summary="Close that window, and write what was seen in it to a file at the server",
        access="admin",
        answers=_json(shapes.ProfileFile),
        errors=(*WITH_ENGINE, "no_profiler", "profiler_idle"),
    ),
    *NUMBERS,
    *TOKENS,
    *RESPONSES,
    *MESSAGES,
    *PAGES,
)
