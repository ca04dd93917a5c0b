"""Whether answers and events are what the openai package says they are."""

from __future__ import annotations

from typing import Any, get_args

from openai.types.responses import Response, ResponseStreamEvent

_KINDS = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}


def check_response(response: dict[str, Any]) -> Response:
    """The response as the package reads it. ValidationError for a field that is missing or of another type."""
    return Response.model_validate(response, strict=True)


def check_events(events: list[dict[str, Any]]) -> list[Any]:
    """The events as the package reads them; they are numbered from 0, and what they add up to is what they end with."""
    assert [event["sequence_number"] for event in events] == list(range(events[0]["sequence_number"], len(events)))
    return [_KINDS[event["type"]].model_validate(event, strict=True) for event in events]


def text_of(response: dict[str, Any]) -> str:
    """What the assistant says in it."""
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)
