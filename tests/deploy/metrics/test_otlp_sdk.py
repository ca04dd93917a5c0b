"""Traces by OpenTelemetry's own SDK to a gRPC collector; skipped where the extra `otel` is not installed."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from millrace.deploy.config import ServerConfig
from millrace.deploy.metrics import otlp_export
from millrace.deploy.server.server import Server
from millrace.stages.testing.scripted.engine import scripted_engine
from tests.deploy.metrics.test_otlp_export import PARENT, TRACE, TRACEPARENT
from tests.deploy.server.test_health import TEXT, Client, eventually

grpc = pytest.importorskip("grpc")
service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")
messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")


class GrpcCollector(service.TraceServiceServicer):  # type: ignore[misc, name-defined]
    """Refuses the first export as busy, and keeps the others."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str]] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        self.metadata.append({pair.key: pair.value for pair in context.invocation_metadata()})
        if len(self.metadata) == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "busy")
        self.requests.append(request)
        return messages.ExportTraceServiceResponse()


@pytest.mark.slow
def test_spans_reach_a_grpc_collector_that_is_busy_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_export, "INTERVAL_S", 0.05)
    collector = GrpcCollector()
    server_of_grpc = grpc.server(ThreadPoolExecutor(2))
    service.add_TraceServiceServicer_to_server(collector, server_of_grpc)
    port = server_of_grpc.add_insecure_port("127.0.0.1:0")
    server_of_grpc.start()
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_HEADERS": "X-Team=a",
        "OTEL_SERVICE_NAME": "chat",
    }

    async def run() -> None:
        async with Server(ServerConfig(port=0), environment=environment) as server, scripted_engine() as engine:
            server.attach(engine)
            client = Client(server.url, engine, server)
            body = {"prompt": "a", "max_tokens": 2, "n": 2}
            async with client.session.post(TEXT, json=body, headers=TRACEPARENT) as response:
                assert response.status == 200

            async def number() -> int:
                return len(collector.requests)

            await eventually(number, bool)
            await client.session.close()
            await server.stop()

    try:
        asyncio.run(run())
    finally:
        server_of_grpc.stop(None)
    assert len(collector.metadata) == 2 and collector.metadata[1]["x-team"] == "a"
    (resource_spans,) = collector.requests[0].resource_spans
    assert [(each.key, each.value.string_value) for each in resource_spans.resource.attributes] == [
        ("service.name", "chat")
    ]
    (scope_spans,) = resource_spans.scope_spans
    assert scope_spans.scope.name == "millrace" and scope_spans.scope.version
    root = next(span for span in scope_spans.spans if span.kind == 2)
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.name) == (TRACE, PARENT, "text_completion scripted")
    values = {each.key: each.value for each in root.attributes}
    assert values["gen_ai.usage.output_tokens"].int_value == 4
    assert [each.string_value for each in values["gen_ai.response.finish_reasons"].array_value.values] == ["length"]
    children = [span for span in scope_spans.spans if span.kind == 1]
    assert children and all(span.parent_span_id == root.span_id for span in children)
    assert all(root.start_time_unix_nano <= span.start_time_unix_nano for span in children)
