"""Numbers of a JSON schema that the schema compiler does not get right.

It has a double for each bound and value, so whole numbers of more than 53 bits change. And it lets a number without
bounds have any number of digits.
"""

from __future__ import annotations

import json
import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from .number_ranges import decimal_range, integer_range
from .schema_keywords import map_schemas

EXACT = 2**53  # whole numbers up to this size are exact in the compiler
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


class UnsupportedBesideNumber(ValueError):
    """What cannot be combined with a number that the compiler cannot hold. The message is for the client."""


def is_inexact(value: Any) -> bool:
    """Whether a value is or holds a number that the compiler would change."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return abs(value) > EXACT
    if isinstance(value, dict):
        return any(is_inexact(part) for part in value.values())
    return isinstance(value, list) and any(is_inexact(part) for part in value)


def may_be_endless(schema: dict[str, Any]) -> bool:
    """Whether the compiler would let a number have digits without end; those of `multipleOf` are left to it."""
    named = schema.get("type")
    types = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    if any(key in schema for key in ("enum", "const", "multipleOf")):
        return False
    has_both = any(key in schema for key in BOUNDS[::2]) and any(key in schema for key in BOUNDS[1::2])
    return "number" in types or ("integer" in types and not has_both)


def number_pattern(schema: dict[str, Any]) -> str:
    """A regular expression of the numbers within a schema's bounds."""
    low, is_low_in = _bound(schema, "minimum", "exclusiveMinimum", max)
    high, is_high_in = _bound(schema, "maximum", "exclusiveMaximum", min)
    if schema["type"] == "integer":
        least = None if low is None else _next_whole(low, is_low_in)
        most = None if high is None else _last_whole(high, is_high_in)
        found = integer_range(least, most)
    else:
        found = decimal_range(low, high, is_low_in, is_high_in)
    if found is None:
        raise UnsupportedBesideNumber("bounds that no number fits")
    return found


def _bound(given: dict[str, Any], inclusive: str, exclusive: str, stricter: Any) -> tuple[Decimal | None, bool]:
    """A bound, and whether it is in. An exclusive bound of true makes the other one exclusive, as draft 4 has it."""
    bounds = []
    if inclusive in given:
        bounds.append((_decimal(given[inclusive]), given.get(exclusive) is not True))
    if exclusive in given and not isinstance(given[exclusive], bool):
        bounds.append((_decimal(given[exclusive]), False))
    if not bounds:
        return None, True
    value = stricter(bound for bound, _ in bounds)
    return value, all(is_in for bound, is_in in bounds if bound == value)


def _decimal(value: Any) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UnsupportedBesideNumber(f"the bound {json.dumps(value)[:40]}")
    return Decimal(repr(value))


def _next_whole(low: Decimal, is_in: bool) -> int:
    """The least whole number from `low` on."""
    whole = int(low.to_integral_value(ROUND_CEILING))
    return whole if is_in or whole != low else whole + 1


def _last_whole(high: Decimal, is_in: bool) -> int:
    """The greatest whole number up to `high`."""
    whole = int(high.to_integral_value(ROUND_FLOOR))
    return whole if is_in or whole != high else whole - 1


def with_nearer_bounds(schema: Any) -> Any:
    """The schema with bounds that the compiler holds, each the nearest one inside of the given.

    Values beside a bound of more than 53 bits are lost, at most one in 2**52. Raises `UnsupportedBesideNumber` for
    other numbers beyond that, as no nearer one equals them.
    """
    if not isinstance(schema, dict):
        return schema
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    if any(is_inexact(value) for value in [*values, schema.get("const")]):
        raise UnsupportedBesideNumber("other keywords around it")
    schema = map_schemas(schema, with_nearer_bounds)
    low, is_low_in = _bound(schema, "minimum", "exclusiveMinimum", max)
    if low is not None and abs(low) > EXACT:
        schema.pop("exclusiveMinimum", None)
        schema["minimum"] = _nearest_held(_next_whole(low, is_low_in))
    high, is_high_in = _bound(schema, "maximum", "exclusiveMaximum", min)
    if high is not None and abs(high) > EXACT:
        schema.pop("exclusiveMaximum", None)
        schema["maximum"] = -_nearest_held(-_last_whole(high, is_high_in))
    return schema


def _nearest_held(low: int) -> int:
    """The least whole number from `low` on that the compiler holds."""
    held = float(max(low, -(2**63) + 1024))
    held = held if held >= low else math.nextafter(held, math.inf)
    if held >= 2**63:
        raise UnsupportedBesideNumber("a bound beyond 64 bits")
    return int(held)
