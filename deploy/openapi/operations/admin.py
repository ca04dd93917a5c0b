"""Operations of the admin routes, which need the admin key."""

from __future__ import annotations

from ...admin.profiler import DEFAULT_S, MAX_S
from ..shapes import server
from .operation import ENGINE_ERRORS, Operation, json

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
)
