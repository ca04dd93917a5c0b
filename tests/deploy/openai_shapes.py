"""Checks of answers and events against the types of the openai package."""

from __future__ import annotations

from typing import Any, get_args

from openai.types.responses import Response, ResponseStreamEvent

_KINDS = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}


def check_response(response: dict[str, Any]) -> Response:
    """The response as the package parses it. ValidationError for a missing field or a wrong type."""
    return Response.model_validate(response, strict=True)


def check_events(events: list[dict[str, Any]]) -> list[Any]:
    """The events as the package parses them. Asserts that they are numbered from 0."""
    assert [event["sequence_number"] for event in events] == list(range(events[0]["sequence_number"], len(events)))
    return [_KINDS[event["type"]].model_validate(event, strict=True) for event in events]


def text_of(response: dict[str, Any]) -> str:
    """The assistant's text."""
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)
