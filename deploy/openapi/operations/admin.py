"""What only the admin key opens."""

from __future__ import annotations

from ...admin.profiler import DEFAULT_S, MAX_S
from ..shapes import openai as shapes
from .operation import ENGINE_ERRORS, Operation, json

ADMIN = (
    Operation(
        method="POST",
        path="/admin/cache/reset",
        name="resetCache",
        group="admin",
        summary="Forget every cached prefix; requests under way go on",
        access="admin",
        answers=json(shapes.CacheReset),
        errors=ENGINE_ERRORS,
    ),
    Operation(
        method="GET",
        path="/admin/trace",
        name="trace",
        group="admin",
        summary="The last seconds of the trace, to be opened at ui.perfetto.dev",
        access="admin",
        query={"seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": 3600, "default": 30}},
        answers=json(shapes.TraceEvents),
        errors=(*ENGINE_ERRORS, "invalid_value"),
    ),
    Operation(
        method="POST",
        path="/admin/flight",
        name="recordFlight",
        group="admin",
        summary="Write the last seconds of the trace, stacks and queues to a file at the server",
        access="admin",
        answers=json(shapes.FlightFile),
        errors=(*ENGINE_ERRORS, "no_flight_recorder"),
    ),
    Operation(
        method="POST",
        path="/admin/profiler/start",
        name="startProfiler",
        group="admin",
        summary="Open a window of torch's profiler; it closes by itself after `seconds`",
        access="admin",
        query={"seconds": {"type": "integer", "minimum": 1, "maximum": MAX_S, "default": DEFAULT_S}},
        answers=json(shapes.ProfilerStarted),
        errors=(*ENGINE_ERRORS, "no_profiler", "profiler_busy", "invalid_value"),
    ),
    Operation(
        method="POST",
        path="/admin/profiler/stop",
        name="stopProfiler",
        group="admin",
        summary="Close that window, and write what was seen in it to a file at the server",
        access="admin",
        answers=json(shapes.ProfileFile),
        errors=(*ENGINE_ERRORS, "no_profiler", "profiler_idle"),
    ),
)
