"""Sends spans by OpenTelemetry's SDK: gRPC or protobuf over HTTP, with the SDK's retries. The extra `otel` has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from .otel_environment import TraceExport
from .otlp import Json

KINDS = {1: SpanKind.INTERNAL, 2: SpanKind.SERVER}
STATUS = {0: StatusCode.UNSET, 1: StatusCode.OK, 2: StatusCode.ERROR}


class SdkSender:
    """An exporter of the SDK. `send` blocks, while it retries too: call it in a thread."""

    def __init__(self, export: TraceExport, version: str) -> None:
        self._exporter = _make_exporter(export)
        self._resource = Resource(dict(export.resource))
        self._scope = InstrumentationScope("millrace", version)

    def send(self, spans: Sequence[Json]) -> bool:
        """Whether the collector accepted the spans, which are in OTLP's JSON form."""
        return self._exporter.export([self._span(span) for span in spans]) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Ends a `send` that waits to retry."""
        self._exporter.shutdown()

    def _span(self, span: Json) -> ReadableSpan:
        parent = span.get("parentSpanId")
        status = span["status"]
        return ReadableSpan(
            name=span["name"],
            context=_context(span["traceId"], span["spanId"]),
            parent=None if parent is None else _context(span["traceId"], parent),
            resource=self._resource,
            attributes=dict(_plain(span["attributes"])),
            kind=KINDS[span["kind"]],
            instrumentation_scope=self._scope,
            status=Status(STATUS[status.get("code", 0)], status.get("message")),
            start_time=int(span["startTimeUnixNano"]),
            end_time=int(span["endTimeUnixNano"]),
        )


def _make_exporter(export: TraceExport) -> SpanExporter:
    if export.protocol == "grpc":
        from grpc import Compression as GrpcCompression
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(
            endpoint=export.endpoint,
            insecure=not export.endpoint.startswith("https://"),
            headers=tuple((name.lower(), value) for name, value in export.headers.items()),
            timeout=export.timeout_s,
            compression=GrpcCompression.Gzip if export.is_compressed else GrpcCompression.NoCompression,
        )
    from opentelemetry.exporter.otlp.proto.http import Compression
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(
        endpoint=export.endpoint,
        headers=dict(export.headers),
        timeout=export.timeout_s,
        compression=Compression.Gzip if export.is_compressed else Compression.NoCompression,
    )


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(1))


def _plain(attributes: Iterable[Json]) -> Iterable[tuple[str, Any]]:
    """Attributes from OTLP's JSON form."""
    for attribute in attributes:
        yield attribute["key"], _value(attribute["value"])


def _value(encoded: Json) -> Any:
    ((kind, value),) = encoded.items()
    if kind == "arrayValue":
        return [_value(item) for item in value["values"]]
    return int(value) if kind == "intValue" else value
