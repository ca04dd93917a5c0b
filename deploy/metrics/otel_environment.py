"""OpenTelemetry's environment variables: where traces go, how, under which name, and which requests are sampled.

As its specification has them: a wrong value is ignored with a warning, and times are in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal, cast, get_args
from urllib.parse import unquote

from ...runtime.env.log import get_logger
from ...stages.errors import ConfigError
from ..http.trace_context import TraceContext

Protocol = Literal["http/json", "http/protobuf", "grpc"]
SamplerName = Literal["always_on", "always_off", "traceidratio"]
SDK_MODULES: Mapping[Protocol, str] = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
}
HTTP_PATH = "/v1/traces"
MAX_SAMPLED = 1 << 64

log = get_logger("millrace.deploy")


@dataclass(frozen=True, slots=True)
class TraceSampler:
    """Which requests are exported: by the caller's choice if `is_parent_based`, else by name."""

    name: SamplerName = "always_on"
    ratio: float = 1.0  # of traceidratio
    is_parent_based: bool = True

    def takes(self, context: TraceContext) -> bool:
        """Whether the spans of a request are exported. Equal for all spans of a trace."""
        if self.is_parent_based and context.parent_id is not None:
            return context.is_sampled
        if self.name == "traceidratio":
            return int(context.trace_id[16:], 16) < round(self.ratio * MAX_SAMPLED)
        return self.name == "always_on"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceExport:
    """How the traces of one server are exported."""

    endpoint: str
    protocol: Protocol = "http/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 10.0  # of one post
    is_compressed: bool = False  # gzip
    resource: Mapping[str, str] = field(default_factory=lambda: {"service.name": "millrace"})
    sampler: TraceSampler = TraceSampler()

    @classmethod
    def read(cls, environment: Mapping[str, str], endpoint: str | None) -> TraceExport | None:
        """What the variables say; `endpoint` is the setting, and wins over them. None: no traces are exported.

        Raises `ConfigError` if the setting asks for what needs a package that is not installed. Without the setting
        that is a warning.
        """
        values = {name: text.strip() for name, text in environment.items() if name.startswith("OTEL_") and text.strip()}
        if values.get("OTEL_SDK_DISABLED", "").lower() == "true":
            if endpoint is not None:
                log.warning("telemetry.off", reason="OTEL_SDK_DISABLED is true")
            return None
        protocol = _protocol(values)
        where = endpoint or _endpoint(values, protocol)
        if where is None:
            return None
        if protocol != "http/json" and not _has_sdk(protocol):
            problem = f"{protocol} needs OpenTelemetry's SDK: pip install 'millrace-engine[otel]', or set "
            problem += "OTEL_EXPORTER_OTLP_PROTOCOL=http/json with the collector's HTTP port, 4318"
            if protocol == "grpc" and endpoint is not None:
                raise ConfigError(f"otlp_traces_endpoint = {endpoint}: {problem}")
            if protocol == "grpc":
                log.warning("telemetry.off", reason=problem)
                return None
            log.warning("telemetry.protocol_changed", protocol="http/json", reason=problem)
            protocol = "http/json"
        return cls(
            endpoint=where,
            protocol=protocol,
            headers=_pairs(values, _name_of(values, "HEADERS")),
            timeout_s=_number(values, _name_of(values, "TIMEOUT"), 10_000.0, most=3_600_000.0) / 1000.0,
            is_compressed=values.get(_name_of(values, "COMPRESSION"), "none") == "gzip",
            resource=_resource(values),
            sampler=_sampler(values),
        )


def _name_of(values: Mapping[str, str], what: str) -> str:
    """The variable of traces if it is set, else that of all signals."""
    own = f"OTEL_EXPORTER_OTLP_TRACES_{what}"
    return own if own in values else f"OTEL_EXPORTER_OTLP_{what}"


def _protocol(values: Mapping[str, str]) -> Protocol:
    name = _name_of(values, "PROTOCOL")
    given = values.get(name, "http/json")
    if given not in get_args(Protocol):
        _ignored(name, given, f"must be one of {', '.join(get_args(Protocol))}")
        return "http/json"
    return cast(Protocol, given)


def _endpoint(values: Mapping[str, str], protocol: Protocol) -> str | None:
    """The URL of traces as it is, or that of all signals with its path; None if neither is set, or for no exporter."""
    if (exporter := values.get("OTEL_TRACES_EXPORTER", "otlp")) != "otlp":
        if exporter != "none":
            _ignored("OTEL_TRACES_EXPORTER", exporter, "must be otlp or none")
        return None
    own, common = values.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"), values.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    name = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" if own else "OTEL_EXPORTER_OTLP_ENDPOINT"
    found = own or common
    if found is None:
        return None
    if not found.startswith(("http://", "https://")):
        if protocol == "grpc":
            return found  # host:port
        _ignored(name, found, "must begin with http:// or https://")
        return None
    return found if own or protocol == "grpc" else found.rstrip("/") + HTTP_PATH


def _resource(values: Mapping[str, str]) -> dict[str, str]:
    """Attributes of the server, `service.name` first."""
    attributes = _pairs(values, "OTEL_RESOURCE_ATTRIBUTES")
    name = values.get("OTEL_SERVICE_NAME") or attributes.get("service.name", "millrace")
    attributes.pop("service.name", None)
    return {"service.name": name, **attributes}


def _sampler(values: Mapping[str, str]) -> TraceSampler:
    given = values.get("OTEL_TRACES_SAMPLER", "parentbased_always_on")
    name = given.removeprefix("parentbased_")
    if name not in get_args(SamplerName):
        _ignored("OTEL_TRACES_SAMPLER", given, f"must be one of {', '.join(get_args(SamplerName))}, or parentbased_")
        return TraceSampler()
    ratio = 1.0
    if name == "traceidratio":
        ratio = _number(values, "OTEL_TRACES_SAMPLER_ARG", 1.0, most=1.0)
    return TraceSampler(cast(SamplerName, name), ratio, name != given)


def _pairs(values: Mapping[str, str], name: str) -> dict[str, str]:
    """`key=value,key=value`, with escapes as in URLs."""
    found = {}
    for part in values.get(name, "").split(","):
        key, equals, value = part.partition("=")
        if equals and key.strip():
            found[unquote(key.strip())] = unquote(value.strip())
        elif part.strip():
            log.warning("telemetry.variable_ignored", name=name, reason="a part is not of the form key=value")
    return found


def _number(values: Mapping[str, str], name: str, default: float, *, most: float) -> float:
    given = values.get(name)
    if given is None:
        return default
    try:
        number = float(given)
    except ValueError:
        number = -1.0
    if not 0.0 <= number <= most:
        _ignored(name, given, f"must be a number from 0 to {most:g}")
        return default
    return number


def _has_sdk(protocol: Protocol) -> bool:
    try:
        return find_spec(SDK_MODULES[protocol]) is not None and find_spec("opentelemetry.sdk.trace") is not None
    except ModuleNotFoundError:
        return False


def _ignored(name: str, value: str, reason: str) -> None:
    log.warning("telemetry.variable_ignored", name=name, value=value[:64], reason=reason)
