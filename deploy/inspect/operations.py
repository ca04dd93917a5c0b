"""Operations of the routes for inspection."""

from __future__ import annotations

from ..api.schema.operation import ENGINE_ERRORS, Operation, json
from . import shapes
from .routes import MAX_CURSOR, MAX_LISTED

OPERATIONS = (
    Operation(
        method="GET",
        path="/v1/requests",
        name="listRequests",
        group="server",
        summary="Running requests without their text, oldest first: those of the API key, or all with the admin key",
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": MAX_LISTED},
            "cursor": {"type": "integer", "minimum": 0, "maximum": MAX_CURSOR, "default": 0},
        },
        answers=json(shapes.Requests),
        errors=(*ENGINE_ERRORS, "invalid_value"),
    ),
    Operation(
        method="GET",
        path="/v1/requests/{id}/explain",
        name="explainRequest",
        group="server",
        summary="The waterfall of a running or recently ended request, and the causes of its latency in words",
        parameters={"id": "The id of the answer, or the request's X-Request-Id"},
        answers=json(shapes.Explanation),
        errors=(*ENGINE_ERRORS, "request_not_found"),
    ),
    Operation(
        method="GET",
        path="/v1/stages",
        name="stages",
        group="server",
        summary="Idle, busy and blocked shares of each stage, fill level of each channel, and the bottleneck",
        answers=json(shapes.Stages),
        errors=ENGINE_ERRORS,
    ),
)
