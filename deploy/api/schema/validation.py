"""Turns plain data into a typed body, or into one `ApiError` that names the wrong field."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from ...errors import ApiError, did_you_mean, shorten, wrong_field
from .body import Body
from .unsupported import refuse_unsupported

SILENT = frozenset({"metadata", "service_tier", "store"})  # accepted, ignored, and not reported as ignored

B = TypeVar("B", bound=Body)


NoteIgnored = Callable[[Sequence[str], Iterable[str]], object]  # of ignored names, and the known ones


def read_body(
    kind: type[B], raw: Mapping[str, Any], strict_fields: bool, note: NoteIgnored | None = None
) -> tuple[B, list[str]]:
    """The body, and the names of unknown fields that were ignored, of which `note` is told.

    `ApiError` 400 names the wrong field.
    """
    ignored = [name for name in raw if name not in kind.model_fields and name not in SILENT]
    ignored = refuse_unsupported(raw, ignored, {**kind.FOREIGN, **kind.UNSUPPORTED}, kind.INSTEAD, kind.model_fields)
    if ignored and strict_fields:
        name = shorten(ignored[0], 64)
        near = did_you_mean(ignored[0], kind.model_fields)
        raise wrong_field(name, f"unknown field; leave it out{near}", code="unknown_parameter")
    if ignored and note is not None:
        note(ignored, kind.model_fields)
    try:
        body = kind.model_validate(raw)
    except ValidationError as errors:
        raise _as_api_error(errors) from None
    body.check()
    return body, ignored


def read_typed(
    kinds: Mapping[str, type[B]], raw: Mapping[str, Any], strict_fields: bool, note: NoteIgnored | None = None
) -> B:
    """The body of the kind that its `type` names. `ApiError` 400 names the wrong field."""
    kind = raw.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        shown = None if kind is None else shorten(repr(kind), 32)
        raise wrong_field("type", f"must be one of {', '.join(kinds)}", shown)
    message, _ = read_body(kinds[kind], raw, strict_fields, note)
    return message


_CODES = {
    "missing": "missing_required_parameter",
    "unsupported_content_type": "unsupported_content_type",
    "unsupported_parameter": "unsupported_parameter",
}
_SHOULD = re.compile(r"^(Input|List|String|Dictionary|Tuple|Value) should\b")
_OBJECTS = frozenset({"model_type", "model_attributes_type", "dict_type"})  # kinds of errors


def _as_api_error(errors: ValidationError) -> ApiError:
    first = errors.errors(include_url=False, include_context=False)[0]
    param = _param(first["loc"])
    kind = first["type"]
    code = _CODES.get(kind) or ("invalid_type" if kind.endswith("_type") else "invalid_value")
    wrong = "must be an object" if kind in _OBJECTS else _in_our_words(first["msg"])
    shown = None if kind == "missing" or isinstance(first["input"], (dict, list)) else _show(first["input"])
    return wrong_field(param, wrong, shown, code)


def _in_our_words(message: str) -> str:
    message = _SHOULD.sub("must", message).replace(" after validation", "")
    return message[0].lower() + message[1:]


def _param(loc: tuple[int | str, ...]) -> str:
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not path:
            path = step
        elif step.isidentifier() and not path.startswith("logit_bias"):
            path += f".{step}"
    return shorten(path, 128)


def _show(value: Any) -> str:
    return shorten(repr(value), 64)
