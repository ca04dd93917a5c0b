"""Parses a JSON body after checking it against limits of size, depth and counts.

The checks are a few numpy passes over the bytes, so a hostile body costs milliseconds. They bound everything that makes
the JSON parser slow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from ..errors import ApiError

Bytes = NDArray[np.uint8]

SHORT_BYTES = 4 * 1024
INLINE_BYTES = 64 * 1024  # a longer body is parsed in a thread

# One call of the C parser holds the GIL, and so stops every stream, until it returns. On one slow core, orjson takes
# 0.1 to 0.2 us a number, 0.4 us a string or container and 0.04 us an escape: these limits keep a call under 50 ms.
MAX_VALUES = 270_000  # room for a prompt of 256k token ids
MAX_STRINGS = 100_000
MAX_CONTAINERS = 20_000
MAX_ESCAPES = 400_000

LONG = 19  # digits; whole numbers of fewer are of 64 bits
_LONG_NUMBER = re.compile(rb"(?<![0-9.eE+-])-?[0-9]{19,}(?![0-9.eE])")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLimits:
    """Limits of a body. The limits that do not depend on configuration are module constants."""

    num_bytes: int = 4 * 1024 * 1024
    depth: int = 32
    keys: int = 10_000
    digits: int = 20  # of one number


def parse_object(data: bytes, limits: JsonLimits) -> dict[str, Any]:
    """The JSON object in `data`; the last value of a repeated key counts.

    `ApiError` 400 names the limit it exceeds, or the position of the syntax error; 413 if it is too long.
    """
    if len(data) > limits.num_bytes:
        raise too_large(limits.num_bytes)
    inexact = _check_bounds(data, limits)
    try:
        parsed = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError("invalid_json", f"the body is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ApiError("invalid_json", f"the body is a JSON {_kind(parsed)}: must be an object")
    if inexact is not None:
        name = next((str(name) for name, value in parsed.items() if _holds(value, float(inexact))), None)
        hint = "whole numbers must be of 64 bits; write it as a string"
        raise ApiError("invalid_value", f"{name or 'the body'} has the number {inexact}: {hint}", param=name)
    return parsed


def too_large(limit: int) -> ApiError:
    """`ApiError` 413 for a body of more than `limit` bytes."""
    return ApiError("body_too_large", f"the body is longer than {limit} bytes: send less, or raise --max-body-bytes")


def _check_bounds(data: bytes, limits: JsonLimits) -> str | None:
    """Raises `ApiError` for a limit that `data` exceeds. Returns the first whole number of more than 64 bits."""
    if _is_trivially_within(data, limits):
        return None
    _at_most("escapes", data.count(b"\\"), 2 * MAX_ESCAPES)
    _at_most("strings", data.count(b'"') // 2, MAX_STRINGS)
    outside = _outside_strings(data)
    _at_most("keys", _count(outside, ":"), limits.keys)
    _at_most("values", _count(outside, ","), MAX_VALUES)
    _at_most("objects and arrays", _count(outside, "{") + _count(outside, "["), MAX_CONTAINERS)
    if _depth(outside) > limits.depth:
        raise ApiError("invalid_json", f"the body is nested more than {limits.depth} deep: flatten it")
    if _has_digit_run(outside, limits.digits + 1):
        hint = "round it, write it with an exponent, or as a string"
        raise ApiError("invalid_json", f"the body has a number of more than {limits.digits} digits: {hint}")
    return _inexact_number(outside.tobytes()) if _has_digit_run(outside, LONG) else None


def _is_trivially_within(data: bytes, limits: JsonLimits) -> bool:
    """Whether a short body is within all limits, regardless of where its strings begin and end.

    Costs a tenth of the full check, as one WebSocket may send thousands of short messages.
    """
    return (
        len(data) <= min(SHORT_BYTES, limits.keys)
        and data.count(b"{") + data.count(b"[") <= limits.depth
        and not re.search(rb"[0-9]{%d}" % min(LONG, limits.digits + 1), data)
    )


def _inexact_number(outside: bytes) -> str | None:
    """The first whole number of more than 64 bits, of which the parser makes a floating-point number."""
    numbers = (found[0] for found in _LONG_NUMBER.finditer(outside))
    return next((number.decode() for number in numbers if not -(2**63) <= int(number) < 2**64), None)


def _holds(value: Any, number: float) -> bool:
    """Whether `value`, or something in it, is `number`. The depth of `value` is bounded."""
    if isinstance(value, dict):
        return any(_holds(each, number) for each in value.values())
    if isinstance(value, list):
        return any(_holds(each, number) for each in value)
    return isinstance(value, float) and value == number


def _at_most(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise ApiError("invalid_json", f"the body has {count} {what}: must be at most {limit}")


def _outside_strings(data: bytes) -> Bytes:
    """The bytes of `data` outside of strings.

    Correct for valid JSON; for other input only the length is bounded.
    """
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote left begins or ends a string
    characters = np.frombuffer(data, np.uint8)
    is_quote = characters == ord('"')
    is_inside = np.bitwise_xor.accumulate(is_quote) if is_quote.size else is_quote
    outside: Bytes = characters[~(is_inside | is_quote)]
    return outside


def _count(characters: Bytes, character: str) -> int:
    return int(np.count_nonzero(characters == ord(character)))


_STEPS = np.zeros(256, np.int8)
_STEPS[[ord("{"), ord("[")]] = 1
_STEPS[[ord("}"), ord("]")]] = -1


def _depth(characters: Bytes) -> int:
    steps = _STEPS[characters]
    steps = steps[steps != 0]
    return int(steps.cumsum(dtype=np.int32).max()) if steps.size else 0


def _has_digit_run(characters: Bytes, length: int) -> bool:
    """Whether `length` digits are in a row.

    `runs[i]`: the `width` bytes from i on are digits; `width` doubles.
    """
    runs = (characters >= ord("0")) & (characters <= ord("9"))
    width = 1
    while width < length:
        step = min(width, length - width)
        if runs.size <= step:
            return False
        runs = runs[:-step] & runs[step:]
        width += step
    return bool(runs.any())


def _kind(value: Any) -> str:
    names = {list: "array", str: "string", int: "number", float: "number", bool: "boolean"}
    return names.get(type(value), "null")
