"""The body fields that constrain the answer's format: OpenAI's, vLLM's and older ones.

This file reads the fields. Their meaning is in `stages/structured_outputs.py`.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

from ....stages.errors import Refused
from ....stages.structured_outputs import KINDS, StructuredOutputs
from ...errors import shorten, wrong_field
from ..schema.body import Body
from .tools import required_first

OLDER = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
EMPTY: dict[str, tuple[Any, ...]] = {  # values of these fields that mean no constraint, as older clients send them
    "guided_json": ({}, ""),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
}
FIELDS = ("response_format", "structured_outputs", *OLDER)
OPTIONS = (*KINDS, "disable_any_whitespace")
# vLLM's options for the grammar library and its fallback: accepted and ignored
WITHOUT_EFFECT = ("_backend", "backend", "disable_fallback", "_backend_was_auto")
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def structured_outputs(body: Body) -> StructuredOutputs | None:
    """The output format that `body` requests, or None.

    `ApiError` names the field; two formats are refused.
    """
    found = {name: form for name in FIELDS if (form := _read(body, name)) is not None}
    if len(found) > 1:
        first, second = list(found)[:2]
        raise wrong_field(second, f"{first} sets the output format already; leave one out")
    return next(iter(found.values()), None)


def field_of(body: Body) -> str:
    """The field in which `body` requests an output format."""
    return next((name for name in FIELDS if getattr(body, name) is not None), "structured_outputs")


def _read(body: Body, name: str) -> StructuredOutputs | None:
    value = getattr(body, name)
    if value is None or value in EMPTY.get(name, ()):
        return None
    try:
        if name == "response_format":
            return _response_format(value)
        return _from_vllm(value) if name == "structured_outputs" else _form({OLDER[name]: value})
    except Refused as refused:
        problem = refused.text.named(lambda path: path.removeprefix("structured_outputs").removeprefix("."))
        raise wrong_field(name, str(problem), code=refused.code) from None


def _response_format(value: Any) -> StructuredOutputs | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind != "json_schema":
        shown = shorten(repr(kind), 64)
        _refuse("response_format", f"type = {shown} must be text, json_object or json_schema")
    return _json_schema(value.get("json_schema"))


def _json_schema(wrapped: Any) -> StructuredOutputs:
    """The form of `{"name": ..., "schema": ..., "strict": ...}`.

    It is always enforced. With `strict`, required keys come first, and white space is as in `json.dumps`.
    """
    if not isinstance(wrapped, dict):
        _refuse("response_format.json_schema", 'must be {"name": ..., "schema": ...}')
    name, schema = wrapped.get("name"), wrapped.get("schema")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        _refuse("response_format.json_schema.name", "must be 1 to 64 letters, digits, _ or -")
    if not isinstance(schema, dict):
        _refuse("response_format.json_schema.schema", "must be a JSON schema, an object")
    is_strict = wrapped.get("strict")
    if not isinstance(is_strict, bool | None):
        _refuse("response_format.json_schema.strict", "must be true or false")
    return StructuredOutputs(
        json=required_first(schema) if is_strict else schema, disable_any_whitespace=bool(is_strict)
    )


def _from_vllm(value: Any) -> StructuredOutputs | None:
    if not isinstance(value, dict):
        _refuse("structured_outputs", "must be an object with one of " + ", ".join(KINDS))
    given = {name: item for name, item in value.items() if item is not None and name not in WITHOUT_EFFECT}
    for name in given:
        if name not in OPTIONS:
            shown, known = shorten(name, 64), ", ".join(OPTIONS)
            _refuse(f"structured_outputs.{shown}", f"not supported; must be one of {known}")
    return _form(given) if given else None


def _form(given: dict[str, Any]) -> StructuredOutputs:
    if isinstance(given.get("choice"), list):
        given["choice"] = tuple(given["choice"])
    return StructuredOutputs(**given)


def _refuse(field: str, problem: str) -> NoReturn:
    raise wrong_field(field, problem)
