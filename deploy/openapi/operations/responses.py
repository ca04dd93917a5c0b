"""OpenAI's Responses API: answers that are kept, and gone on from."""

from __future__ import annotations

from ...api.responses.bodies import ResponsesBody
from ...api.responses.routes import MAX_ITEMS_LISTED
from ..shapes import other_apis as api_shapes
from .operation import ENGINE_ERRORS, GENERATION_ERRORS, SOCKET, Operation, json, json_or_named_events

STORED = {"id": "the id of the response"}
RESPONSES = (
    Operation(
        method="POST",
        path="/v1/responses",
        name="createResponse",
        group="responses",
        summary="A response, whole, as a stream or in the background",
        body=ResponsesBody,
        answers=json_or_named_events(api_shapes.Response, api_shapes.ResponseEvent),
        errors=(*GENERATION_ERRORS, "response_not_found"),
    ),
    Operation(
        method="GET",
        path="/v1/responses",
        name="responsesSocket",
        group="sockets",
        summary="A WebSocket on which responses are asked for, one after the other; 426 without an upgrade",
        answers=SOCKET,
        errors=(*ENGINE_ERRORS, "upgrade_required"),
    ),
    Operation(
        method="GET",
        path="/v1/responses/{id}",
        name="getResponse",
        group="responses",
        summary="A response that is kept, or the events that it is made by",
        parameters=STORED,
        query={
            "stream": {
                "type": "string",
                "enum": ["true", "false"],
                "description": "events; of one made with background and stream",
            },
            "starting_after": {
                "type": "integer",
                "minimum": 0,
                "maximum": 2**31 - 1,
                "description": "the sequence number of the last event that is known",
            },
        },
        answers=json_or_named_events(api_shapes.Response, api_shapes.ResponseEvent),
        errors=(*ENGINE_ERRORS, "response_not_found", "invalid_value"),
    ),
    Operation(
        method="DELETE",
        path="/v1/responses/{id}",
        name="deleteResponse",
        group="responses",
        summary="Keep a response no longer; one that is being made ends",
        parameters=STORED,
        answers=json(api_shapes.DeletedResponse),
        errors=("response_not_found",),
    ),
    Operation(
        method="POST",
        path="/v1/responses/{id}/cancel",
        name="cancelResponse",
        group="responses",
        summary="End a response that is made in the background",
        parameters=STORED,
        answers=json(api_shapes.Response),
        errors=("response_not_found", "invalid_value"),
    ),
    Operation(
        method="GET",
        path="/v1/responses/{id}/input_items",
        name="listInputItems",
        group="responses",
        summary="What a response answered, with all that it went on from",
        parameters=STORED,
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS_LISTED, "default": 20},
            "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
            "after": {"type": "string", "description": "the id of the last item that is known"},
        },
        answers=json(api_shapes.InputItems),
        errors=(*ENGINE_ERRORS, "response_not_found", "invalid_value"),
    ),
)
