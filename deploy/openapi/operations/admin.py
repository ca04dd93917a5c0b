"""Operations of the admin routes, which need the admin key."""

from __future__ import annotations

from ...admin.adapters import LoadAdapterBody, UnloadAdapterBody
from ...admin.profiler import DEFAULT_S, MAX_S
from ..shapes import server
from .operation import ENGINE_ERRORS, Operation, json, text

ADMIN = (
    Operation(
        method="POST",
        path="/admin/cache/reset",
        name="resetCache",
        group="admin",
        summary="Clear the prefix cache; running requests continue",
        access="admin",
        answers=json(server.CacheReset),
        errors=ENGINE_ERRORS,
    ),
    Operation(
        method="GET",
        path="/admin/trace",
        name="trace",
        group="admin",
        summary="The last seconds of the trace, for ui.perfetto.dev",
        access="admin",
        query={"seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": 3600, "default": 30}},
        answers=json(server.TraceEvents),
        errors=(*ENGINE_ERRORS, "invalid_value"),
    ),
    Operation(
        method="POST",
        path="/admin/flight",
        name="recordFlight",
        group="admin",
        summary="Write the last seconds of the trace, stacks and queues to a file on the server",
        access="admin",
        answers=json(server.FlightFile),
        errors=(*ENGINE_ERRORS, "no_flight_recorder"),
    ),
    Operation(
        method="POST",
        path="/admin/profiler/start",
        name="startProfiler",
        group="admin",
        summary="Start torch's profiler; it stops after `seconds`",
        access="admin",
        query={"seconds": {"type": "integer", "minimum": 1, "maximum": MAX_S, "default": DEFAULT_S}},
        answers=json(server.ProfilerStarted),
        errors=(*ENGINE_ERRORS, "no_profiler", "profiler_busy", "invalid_value"),
    ),
    Operation(
        method="POST",
        path="/admin/profiler/stop",
        name="stopProfiler",
        group="admin",
        summary="Stop torch's profiler and write its profile to a file on the server",
        access="admin",
        answers=json(server.ProfileFile),
        errors=(*ENGINE_ERRORS, "no_profiler", "profiler_idle"),
    ),
    Operation(
        method="GET",
        path="/admin/adapters",
        name="listAdapters",
        group="admin",
        summary="The LoRA adapters: where they are, what they take, which requests use them",
        access="admin",
        answers=json(server.Adapters),
        errors=(*ENGINE_ERRORS, "not_found"),
    ),
    Operation(
        method="POST",
        path="/v1/load_lora_adapter",
        name="loadAdapter",
        group="admin",
        summary="Load a LoRA adapter from a folder in --lora-dir",
        access="admin",
        body=LoadAdapterBody,
        answers=text("text/plain"),
        errors=(*ENGINE_ERRORS, "invalid_value", "not_found", "rate_limit_exceeded"),
    ),
    Operation(
        method="POST",
        path="/v1/unload_lora_adapter",
        name="unloadAdapter",
        group="admin",
        summary="Remove a LoRA adapter's name; requests in progress end as they would",
        access="admin",
        body=UnloadAdapterBody,
        answers=text("text/plain"),
        errors=(*ENGINE_ERRORS, "invalid_value", "not_found"),
    ),
)
