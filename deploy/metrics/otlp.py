"""Requests as OpenTelemetry spans in OTLP/JSON: a root span and one child per phase.

The attributes follow OpenTelemetry's semantic conventions for generative AI (`gen_ai.*`). They contain no text of
prompts or answers.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...runtime.trace.request_spans import RequestSpans
from ..http.trace_context import TraceContext

Json = dict[str, Any]
INTERNAL, SERVER = 1, 2  # OTLP span kinds
OK, ERROR = 1, 2  # OTLP status codes


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """An ended request with the data that the trace lacks."""

    number: int  # id of its first sequence
    num_sequences: int
    context: TraceContext
    attributes: Mapping[str, Any]
    operation: str  # chat, text_completion or embeddings
    error: str | None  # error code


def export_request(spans: Iterable[Json], resource: Mapping[str, Any], version: str) -> Json:
    """The body of a POST to a collector's `/v1/traces`."""
    scope = {"scope": {"name": "millrace", "version": version}, "spans": list(spans)}
    return {"resourceSpans": [{"resource": {"attributes": attributes(resource)}, "scopeSpans": [scope]}]}


def spans_of(ended: EndedRequest, request: RequestSpans, model: str, to_unix_ns: int) -> list[Json]:
    """The root span, then its children. `to_unix_ns` is added to trace times to get Unix times."""
    request_attributes = {
        "gen_ai.operation.name": ended.operation,
        "gen_ai.provider.name": "millrace",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request.request_id,
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "gen_ai.usage.output_tokens": request.num_generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
        "millrace.cause": request.cause,
        "error.type": ended.error,
    }
    if request.first_token_ns is not None:
        request_attributes["gen_ai.response.time_to_first_chunk"] = (request.first_token_ns - request.begin_ns) / 1e9
    context = ended.context
    root = _span(context, context.span_id, context.parent_id, f"{ended.operation} {model}", SERVER)
    root |= _times(request.begin_ns, request.end_ns, to_unix_ns)
    root |= {"attributes": attributes(request_attributes | dict(ended.attributes))}
    root |= {"status": {"code": OK} if ended.error is None else {"code": ERROR, "message": ended.error}}
    children = [
        _span(context, secrets.token_hex(8), context.span_id, span.name, INTERNAL)
        | _times(span.begin_ns, span.end_ns, to_unix_ns)
        | {"attributes": attributes({"millrace.stage": span.name}), "status": {}}
        for span in request.spans
    ]
    return [root, *children]


def attributes(values: Mapping[str, Any]) -> list[Json]:
    """Attributes in OTLP's encoding; those with value None are left out."""
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: Any) -> Json:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}  # OTLP encodes 64-bit integers as strings
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, (list, tuple)):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": str(value)}


def _span(context: TraceContext, span_id: str, parent_id: str | None, name: str, kind: int) -> Json:
    span: Json = {"traceId": context.trace_id, "spanId": span_id, "name": name, "kind": kind, "flags": 0x100 | 1}
    return span | ({} if parent_id is None else {"parentSpanId": parent_id})


def _times(begin_ns: int, end_ns: int, to_unix_ns: int) -> Json:
    return {"startTimeUnixNano": str(begin_ns + to_unix_ns), "endTimeUnixNano": str(end_ns + to_unix_ns)}
