"""OpenTelemetry's environment variables."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import orjson
import pytest
from aiohttp import web

from millrace.deploy.config import ServerConfig
from millrace.deploy.http.trace_context import TraceContext
from millrace.deploy.metrics import otel_environment, otlp_export
from millrace.deploy.metrics.otel_environment import TraceExport, TraceSampler
from millrace.deploy.server.server import Server
from millrace.runtime.env.log import captured_logs
from millrace.stages.errors import ConfigError
from millrace.stages.testing.scripted.engine import scripted_engine
from tests.deploy.metrics.test_otlp_export import attributes, check_otlp
from tests.deploy.server.test_health import Client, eventually

HOST = "http://collector:4318"


def read(endpoint: str | None = None, **variables: str) -> TraceExport:
    found = TraceExport.read({f"OTEL_{name}": value for name, value in variables.items()}, endpoint)
    assert found is not None
    return found


def test_the_endpoint_of_all_signals_gets_the_path_and_that_of_traces_does_not():
    assert read(EXPORTER_OTLP_ENDPOINT=HOST).endpoint == f"{HOST}/v1/traces"
    assert read(EXPORTER_OTLP_ENDPOINT=f"{HOST}/in/").endpoint == f"{HOST}/in/v1/traces"
    own = {"EXPORTER_OTLP_TRACES_ENDPOINT": f"{HOST}/t"}
    assert read(EXPORTER_OTLP_ENDPOINT=HOST, **own).endpoint == f"{HOST}/t"
    assert read(f"{HOST}/flag", EXPORTER_OTLP_ENDPOINT=HOST, **own).endpoint == f"{HOST}/flag"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SERVICE_NAME": "a"},
        {"EXPORTER_OTLP_ENDPOINT": ""},
        {"EXPORTER_OTLP_ENDPOINT": HOST, "SDK_DISABLED": "TRUE"},
        {"EXPORTER_OTLP_ENDPOINT": HOST, "TRACES_EXPORTER": "none"},
    ],
)
def test_without_an_endpoint_or_switched_off_nothing_is_exported(variables: dict[str, str]):
    environment = {f"OTEL_{name}": value for name, value in variables.items()}
    assert TraceExport.read(environment, None) is None


def test_names_headers_and_times_are_read_and_those_of_traces_win():
    export = read(
        EXPORTER_OTLP_ENDPOINT=HOST,
        EXPORTER_OTLP_HEADERS="a=1",
        EXPORTER_OTLP_TRACES_HEADERS="Authorization=Bearer%20x%2Cy, b = 2 ,",
        EXPORTER_OTLP_TIMEOUT="2500",
        EXPORTER_OTLP_COMPRESSION="gzip",
        RESOURCE_ATTRIBUTES="deployment.environment=prod,service.name=other,team=a%3Db",
        SERVICE_NAME="chat",
    )
    assert export.headers == {"Authorization": "Bearer x,y", "b": "2"}
    assert (export.timeout_s, export.is_compressed, export.protocol) == (2.5, True, "http/json")
    assert export.resource == {"service.name": "chat", "deployment.environment": "prod", "team": "a=b"}
    assert read(HOST, RESOURCE_ATTRIBUTES="service.name=other").resource == {"service.name": "other"}
    assert read(HOST).resource == {"service.name": "millrace"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EXPORTER_OTLP_PROTOCOL", "smoke"),
        ("EXPORTER_OTLP_TIMEOUT", "soon"),
        ("EXPORTER_OTLP_TIMEOUT", "-1"),
        ("EXPORTER_OTLP_HEADERS", "no-equals-sign"),
        ("TRACES_SAMPLER", "jaeger_remote"),
    ],
)
def test_a_wrong_value_is_told_and_ignored(name: str, value: str):
    with captured_logs() as logs:
        assert read(HOST, **{name: value}) == read(HOST)
    assert [(line["event"], line["name"]) for line in logs] == [("telemetry.variable_ignored", f"OTEL_{name}")]


def test_without_the_sdk_protobuf_becomes_json_and_grpc_is_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(otel_environment, "_has_sdk", lambda protocol: False)
    with captured_logs() as logs:
        assert read(HOST, EXPORTER_OTLP_PROTOCOL="http/protobuf").protocol == "http/json"
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
        assert TraceExport.read(variables, None) is None
    assert [line["event"] for line in logs] == ["telemetry.protocol_changed", "telemetry.off"]
    assert "pip install 'millrace-engine[otel]'" in logs[1]["reason"]
    with pytest.raises(ConfigError, match="grpc needs OpenTelemetry's SDK"):
        read("http://c:4317", EXPORTER_OTLP_PROTOCOL="grpc")


def test_with_the_sdk_grpc_takes_the_endpoint_as_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(otel_environment, "_has_sdk", lambda protocol: True)
    for endpoint in ("c:4317", "http://c:4317"):
        export = read(EXPORTER_OTLP_ENDPOINT=endpoint, EXPORTER_OTLP_PROTOCOL="grpc")
        assert (export.endpoint, export.protocol) == (endpoint, "grpc")


@pytest.mark.parametrize(
    ("variables", "taken"),  # of: no parent, small id; no parent, large id; sampled parent; parent that is not sampled
    [
        ({}, (True, True, True, False)),
        ({"TRACES_SAMPLER": "always_on"}, (True, True, True, True)),
        ({"TRACES_SAMPLER": "always_off"}, (False, False, False, False)),
        ({"TRACES_SAMPLER": "parentbased_always_off"}, (False, False, True, False)),
        ({"TRACES_SAMPLER": "traceidratio", "TRACES_SAMPLER_ARG": "0.5"}, (True, False, False, False)),
        ({"TRACES_SAMPLER": "parentbased_traceidratio", "TRACES_SAMPLER_ARG": "0.5"}, (True, False, True, False)),
        ({"TRACES_SAMPLER": "parentbased_traceidratio"}, (True, True, True, False)),
    ],
)
def test_a_sampler_takes_the_traces_that_its_name_says(variables: dict[str, str], taken: tuple[bool, ...]):
    small, large = "f" * 16 + "7" + "f" * 15, "0" * 16 + "8" + "0" * 15
    contexts = (
        *(TraceContext(small), TraceContext(large)),
        *(TraceContext(large, "1" * 16, True), TraceContext(large, "1" * 16, False)),
    )
    sampler: TraceSampler = read(HOST, **variables).sampler
    assert tuple(sampler.takes(context) for context in contexts) == taken


def test_variables_alone_make_a_server_export_under_its_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(otlp_export, "INTERVAL_S", 0.05)
    posts: list[tuple[dict[str, str], Any]] = []

    async def traces(request: web.Request) -> web.Response:
        body = await request.read()  # aiohttp has unpacked it
        raw = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
        posts.append((dict(request.headers), orjson.loads(raw)))
        return web.json_response({})

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.post("/v1/traces", traces)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{runner.addresses[0][1]}",
            "OTEL_EXPORTER_OTLP_HEADERS": "X-Team=a",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_SERVICE_NAME": "chat",
        }
        async with Server(ServerConfig(port=0), environment=environment) as server, scripted_engine() as engine:
            server.attach(engine)
            client = Client(server.url, engine, server)
            async with client.session.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}) as response:
                assert response.status == 200 and "traceresponse" in response.headers

            async def number() -> int:
                return len(posts)

            await eventually(number, bool)
            await client.session.close()
            await server.stop()
        await runner.cleanup()

    asyncio.run(run())
    headers, body = posts[0]
    assert (headers["X-Team"], headers["Content-Encoding"]) == ("a", "gzip")
    assert attributes(body["resourceSpans"][0]["resource"]) == {"service.name": "chat"}
    body["resourceSpans"][0]["resource"]["attributes"] = [{"key": "service.name", "value": {"stringValue": "millrace"}}]
    assert check_otlp(body)
