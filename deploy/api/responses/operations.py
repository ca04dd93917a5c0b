"""Operations of OpenAI's Responses API, with stored responses."""

from __future__ import annotations

from ..schema.operation import ENGINE_ERRORS, GENERATION_ERRORS, SOCKET, Operation, json, json_or_named_events
from . import shapes
from .bodies import ResponsesBody
from .input_items import MAX_ITEMS_LISTED

STORED = {"id": "The id of the response"}
OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/responses",
        name="createResponse",
        group="responses",
        summary="A response, whole, as a stream or in the background",
        body=ResponsesBody,
        answers=json_or_named_events(shapes.Response, shapes.ResponseEvent),
        errors=(*GENERATION_ERRORS, "response_not_found"),
    ),
    Operation(
        method="GET",
        path="/v1/responses",
        name="responsesSocket",
        group="sockets",
        summary="A WebSocket for responses, one after the other; 426 without an upgrade",
        answers=SOCKET,
        errors=(*ENGINE_ERRORS, "upgrade_required"),
    ),
    Operation(
        method="GET",
        path="/v1/responses/{id}",
        name="getResponse",
        group="responses",
        summary="A stored response, or its events",
        parameters=STORED,
        query={
            "stream": {
                "type": "string",
                "enum": ["true", "false"],
                "description": "Return events; only for a response created with background and stream",
            },
            "starting_after": {
                "type": "integer",
                "minimum": 0,
                "maximum": 2**31 - 1,
                "description": "Return the events after this sequence number",
            },
        },
        answers=json_or_named_events(shapes.Response, shapes.ResponseEvent),
        errors=(*ENGINE_ERRORS, "response_not_found", "invalid_value"),
    ),
    Operation(
        method="DELETE",
        path="/v1/responses/{id}",
        name="deleteResponse",
        group="responses",
        summary="Delete a stored response; a running one is cancelled",
        parameters=STORED,
        answers=json(shapes.DeletedResponse),
        errors=("response_not_found",),
    ),
    Operation(
        method="POST",
        path="/v1/responses/{id}/cancel",
        name="cancelResponse",
        group="responses",
        summary="Cancel a response that runs in the background",
        parameters=STORED,
        answers=json(shapes.Response),
        errors=("response_not_found", "invalid_value"),
    ),
    Operation(
        method="GET",
        path="/v1/responses/{id}/input_items",
        name="listInputItems",
        group="responses",
        summary="The input items of a response, including those of previous responses",
        parameters=STORED,
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS_LISTED, "default": 20},
            "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
            "after": {"type": "string", "description": "Return the items after the item with this id"},
        },
        answers=json(shapes.InputItems),
        errors=(*ENGINE_ERRORS, "response_not_found", "invalid_value"),
    ),
)
