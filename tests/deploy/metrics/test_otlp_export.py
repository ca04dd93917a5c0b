"""Exports to an OpenTelemetry collector: OTLP's shape, the caller's trace, and the times of the trace."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from millrace.deploy.http.trace_context import read_traceparent
from millrace.deploy.metrics import otlp_export as telemetry
from millrace.runtime.env.log import captured_logs
from tests.deploy.metrics.test_metrics import of
from tests.deploy.server.test_health import TEXT, eventually, served

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
SECRET_PROMPT = "nobody-may-read-this-anywhere"
VALUES = {"stringValue": str, "intValue": str, "doubleValue": float, "boolValue": bool, "arrayValue": dict}


class Collector:
    """A collector: accepts POST /v1/traces, checks the shape and keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.texts: list[str] = []
        self.status = 200
        self.num_posts = 0

    async def traces(self, request: web.Request) -> web.Response:
        self.num_posts += 1
        assert request.content_type == "application/json"
        body = await request.json()
        if self.status == 200:
            self.texts.append(await request.text())
            self.spans += check_otlp(body)
        return web.json_response({"partialSuccess": {}}, status=self.status)


def check_otlp(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The spans; AssertionError unless it is an ExportTraceServiceRequest in OTLP's JSON form."""
    spans = []
    for resource in body["resourceSpans"]:
        assert attributes(resource["resource"])["service.name"] == "millrace"
        for scope in resource["scopeSpans"]:
            assert scope["scope"]["name"] == "millrace" and scope["scope"]["version"]
            spans += scope["spans"]
    for span in spans:
        assert re.fullmatch("[0-9a-f]{32}", span["traceId"]) and re.fullmatch("[0-9a-f]{16}", span["spanId"])
        assert span["name"] and span["kind"] in range(6) and span["status"].get("code", 0) in (0, 1, 2)
        assert re.fullmatch(r"\d+", span["startTimeUnixNano"]) and re.fullmatch(r"\d+", span["endTimeUnixNano"])
        assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
        attributes(span)
    return spans


def attributes(owner: dict[str, Any]) -> dict[str, Any]:
    told = {}
    for pair in owner["attributes"]:
        ((kind, value),) = pair["value"].items()
        assert isinstance(value, VALUES[kind]), pair
        if kind == "arrayValue":
            value = [next(iter(item.values())) for item in value["values"]]
        told[pair["key"]] = int(value) if kind == "intValue" else value
    assert len(told) == len(owner["attributes"]), "a key twice"
    return told


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    collects, app = Collector(), web.Application()
    app.add_routes([web.post("/v1/traces", collects.traces)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield collects, f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    finally:
        await runner.cleanup()


async def spans_in(collects: Collector, count: int) -> list[dict[str, Any]]:
    async def roots() -> list[dict[str, Any]]:
        return [span for span in collects.spans if span["kind"] == 2]

    found: list[dict[str, Any]] = await eventually(roots, lambda spans: len(spans) >= count)
    return found


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "INTERVAL_S", 0.05)


def test_each_request_is_a_root_span_in_its_callers_trace_with_a_child_per_stage():
    async def run() -> None:
        async with collector() as (collects, url), served({"otlp_traces_endpoint": url}, step_s=0.002) as client:
            began_ns = time.time_ns()
            body = {"prompt": SECRET_PROMPT, "max_tokens": 20, "n": 2, "temperature": 0.5}
            async with client.session.post(TEXT, json=body, headers=TRACEPARENT | {"X-Request-Id": "one"}) as response:
                assert response.status == 200
                told = response.headers["traceresponse"]
            await client.post({"prompt": [5] * 600}, "two")
            roots = await spans_in(collects, 2)
            ended_ns = time.time_ns()
            named = {attributes(root)["gen_ai.response.id"]: root for root in roots}
            one, two = named["cmpl-one"], named["cmpl-two"]
            assert (one["traceId"], one["parentSpanId"], one["name"]) == (TRACE, PARENT, "text_completion scripted")
            assert told == f"00-{TRACE}-{one['spanId']}-01"
            assert began_ns - 5e6 < int(one["startTimeUnixNano"]) < int(one["endTimeUnixNano"]) < ended_ns + 5e6
            facts = attributes(one)
            assert facts["gen_ai.operation.name"] == "text_completion" and facts["gen_ai.request.model"] == "scripted"
            assert (facts["gen_ai.usage.input_tokens"], facts["gen_ai.usage.output_tokens"]) == (29, 40)
            assert (facts["gen_ai.request.max_tokens"], facts["gen_ai.request.temperature"]) == (20, 0.5)
            assert facts["gen_ai.response.finish_reasons"] == ["length"] and one["status"] == {"code": 1}
            children = [span for span in collects.spans if span.get("parentSpanId") == one["spanId"]]
            names = [span["name"] for span in children]
            assert names == ["intake", "tokenize", "schedule", "queue", "prefill", "decode"]
            for child in children:
                assert child["traceId"] == TRACE
                assert int(one["startTimeUnixNano"]) <= int(child["startTimeUnixNano"])
                assert int(child["endTimeUnixNano"]) <= int(one["endTimeUnixNano"])
            assert two["traceId"] != TRACE and "parentSpanId" not in two
            assert two["status"] == {"code": 2, "message": "context_length_exceeded"}
            assert SECRET_PROMPT not in "".join(collects.texts)
            assert of(await client.scrape(), "millrace:otlp_requests_sent_total") == 2

    asyncio.run(run())


def test_a_trace_that_its_caller_does_not_sample_is_not_told_of():
    async def run() -> None:
        async with collector() as (collects, url), served({"otlp_traces_endpoint": url}) as client:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
            async with client.session.post(TEXT, json={"prompt": "a", "max_tokens": 2}, headers=headers) as response:
                assert response.status == 200
            await client.post({"prompt": "a", "max_tokens": 2})
            (root,) = await spans_in(collects, 1)
            assert root["traceId"] != TRACE

    asyncio.run(run())


def test_a_collector_that_is_gone_costs_spans_and_no_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(telemetry, "MAX_QUEUED", 3)
    monkeypatch.setattr(telemetry, "INTERVAL_S", 0.2)

    async def run() -> None:
        async with served({"otlp_traces_endpoint": "http://127.0.0.1:9/v1/traces"}) as client:
            for _ in range(5):
                assert (await client.post({"prompt": "a", "max_tokens": 2}))[0] == 200
            sends = client.server.telemetry
            assert sends is not None

            async def num_dropped() -> int:
                return sends.num_dropped

            await eventually(num_dropped, lambda count: count == 5)
            assert sends.num_sent == 0

    with captured_logs() as logs:
        asyncio.run(run())
    assert any(line["event"] == "telemetry.dropped" for line in logs)


@pytest.mark.parametrize(("status", "num_posts"), [(503, 3), (400, 1)])
def test_what_a_collector_has_no_time_for_is_sent_again_and_what_it_refuses_is_not(status: int, num_posts: int):
    async def run() -> None:
        async with collector() as (collects, url), served({"otlp_traces_endpoint": url}) as client:
            collects.status = status
            await client.post({"prompt": "a", "max_tokens": 2})
            sends = client.server.telemetry
            assert sends is not None

            async def num_dropped() -> int:
                return sends.num_dropped

            await eventually(num_dropped, bool)
            assert collects.num_posts == num_posts

    with captured_logs():
        asyncio.run(run())


def test_what_is_left_is_sent_at_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(telemetry, "INTERVAL_S", 100.0)

    async def run() -> None:
        async with collector() as (collects, url):
            async with served({"otlp_traces_endpoint": url}) as client:
                await client.post({"prompt": "a", "max_tokens": 2})
            assert len([span for span in collects.spans if span["kind"] == 2]) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    "header",
    [
        *(None, "", "x", f"00-{TRACE}-{PARENT}", f"00-{TRACE.upper()}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"),
        *(f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{PARENT}-01-more"),
    ],
)
def test_a_malformed_traceparent_begins_a_trace(header: str | None):
    context = read_traceparent(header)
    assert context.trace_id != TRACE and context.parent_id is None and context.is_sampled


def test_a_later_version_of_traceparent_is_understood_as_far_as_it_is_known():
    context = read_traceparent(f"01-{TRACE}-{PARENT}-03-more")
    assert (context.trace_id, context.parent_id, context.is_sampled) == (TRACE, PARENT, True)
