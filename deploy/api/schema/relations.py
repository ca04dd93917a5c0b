"""Rules between fields of one body, each said once: its JSON schema for the OpenAPI document, and its check.

A schema cannot express rules that compare two numbers; those have a check alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import wrong_field
from .hints import Schema, has, only_with

Check = Callable[[Any], None]  # of a body; raises `ApiError`, which names the field to change


@dataclass(frozen=True, slots=True)
class Relation:
    """One rule. `Body` puts the schema into the document, and runs the check after the types of fields."""

    schema: Schema | None  # None: no schema can say it
    check: Check = lambda body: None  # none: the check of another relation, or of a field, implies it


def requires(field: str, asked: Schema, other: str, value: bool, why: str = "") -> Relation:
    """If `field` matches the schema `asked`, and so is neither null nor false, the flag `other` must be `value`."""

    def check(body: Any) -> None:
        given = getattr(body, field)
        if given is not None and given is not False and bool(getattr(body, other)) is not value:
            raise wrong_field(field, f"requires {other} = {str(value).lower()}{why}")

    return Relation(only_with(field, asked, {other: value}), check)


Off = Mapping[str, tuple[Any, ...]]  # field -> its values that ask for nothing


def switched(switch: str, with_it: Off, without_it: Off | None = None) -> Relation:
    """Fields that need the flag `switch`, and others that are not supported with it. Null asks for nothing anyway.

    One schema for all of them, as generators of bodies multiply the branches of all relations.
    """

    fields_on, fields_off = tuple((without_it or {}).items()), tuple(with_it.items())

    def check(body: Any) -> None:
        is_on = bool(getattr(body, switch))
        for field, off in fields_on if is_on else fields_off:
            given = getattr(body, field)
            if given is not None and not any(given == value and type(given) is type(value) for value in off):
                problem = f"not supported with {switch} = true; leave one of the two out"
                raise wrong_field(field, problem if is_on else f"requires {switch} = true")

    schema: Schema = {"if": has(switch, {"const": True}), "else": {"properties": _only(with_it)}}
    return Relation(schema | ({"then": {"properties": _only(without_it)}} if without_it else {}), check)


def _only(fields: Off) -> Schema:
    return {name: {"type": "null"} if off == (None,) else {"enum": list(off)} for name, off in fields.items()}
