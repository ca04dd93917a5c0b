"""Parameters of eight tools, which a model that knows nothing must be able to call: strings and arrays have an end."""

from __future__ import annotations

from typing import Any

ID = 1234567890123456789

_ADDRESS = {
    "type": "object",
    "properties": {
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "city": {"type": "string", "maxLength": 20},
    },
    "required": ["city"],
}
_FILTER = {
    "type": "object",
    "properties": {
        "field": {"type": "string", "maxLength": 10},
        "op": {"enum": ["<", "=", ">"]},
        "value": {"anyOf": [{"type": "string", "maxLength": 10}, {"type": "number"}, {"type": "boolean"}]},
    },
    "required": ["field", "op", "value"],
}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": _object(
        ["user"],
        note={"type": "string", "maxLength": 30},
        user=_object(["name", "address"], name={"type": "string", "maxLength": 20}, address=_ADDRESS),
    ),
    "arrays": _object(
        ["tags", "points"],
        tags={"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 5},
        points={
            "type": "array",
            "items": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
            "maxItems": 1,
        },
    ),
    "enums": _object(
        ["colour", "level"],
        colour={"enum": ["red", "green", "blue"]},
        size={"type": "string", "enum": ["s", "m", "l"]},
        level={"enum": [1, 2.5, None, "high"]},
    ),
    "optional": _object(
        ["query"],
        limit={"type": "integer"},
        order={"type": "string", "maxLength": 8},
        query={"type": "string", "maxLength": 24},
        is_deep={"type": "boolean"},
    ),
    "unicode": _object(
        ["日本", "farbe"],
        größe={"type": "number"},
        日本={"type": "string", "maxLength": 12},
        farbe={"enum": ["grün", "🙂 ok", 'a "quoted" one']},
    ),
    "numbers": _object(
        ["count", "ratio", "x", "step"],
        count={"type": "integer", "minimum": 0},
        ratio={"type": "number", "minimum": 0, "maximum": 1},
        x={"type": "number"},
        step={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000},
    ),
    "ids": _object(
        ["id"],
        id={"enum": [ID, -ID, 2**53 + 1]},
        parent={"type": "integer", "minimum": 10**18 + 1, "maximum": 2**63 - 1},
    ),
    "filters": _object(
        ["filters"],
        filters={"type": "array", "items": _FILTER, "maxItems": 2},
        after={"anyOf": [{"type": "null"}, {"type": "string", "format": "uuid"}]},
    ),
}
