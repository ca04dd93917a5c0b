"""A JSON schema before it is compiled: without what constrains nothing, and with patterns that the compiler gets right.

The grammar compiler refuses each keyword that it does not implement, also where the keyword's value has no effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

# keywords that hold schemas; all others hold data
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS_OF_SCHEMAS = ("anyOf", "allOf", "oneOf", "prefixItems")
ONE_SCHEMA = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")

# Formats that an answer is held to. All others are annotations, as JSON Schema has them by default.
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"},
)
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "$dynamicRef")


def map_schemas(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A copy of a schema in which each schema directly inside went through `change`."""
    changed = dict(schema)
    for key, value in schema.items():
        if key in SCHEMAS_BY_NAME and isinstance(value, dict):
            changed[key] = {name: change(inner) for name, inner in value.items()}
        elif isinstance(value, list) and (key in LISTS_OF_SCHEMAS or key == "items"):
            changed[key] = [change(inner) for inner in value]
        elif key in ONE_SCHEMA:
            changed[key] = change(value)
    return changed


def target_of(root: Any, reference: str) -> Any:
    """What a reference within the schema `root` points to; None if it points to nothing or elsewhere."""
    if not reference.startswith("#"):
        return None
    target: Any = root
    for step in unquote(reference[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list):
            target = target[int(step)] if step.isdecimal() and int(step) < len(target) else None
        else:
            target = target.get(step) if isinstance(target, dict) else None
    return target


def without_idle_keywords(schema: Any) -> Any:
    """An equal schema without keywords that have no effect."""
    if not isinstance(schema, dict):
        return schema
    schema = map_schemas(schema, without_idle_keywords)
    for key in [key for key, is_idle in _IDLE.items() if key in schema and is_idle(schema)]:
        schema.pop(key, None)
    for key in COUNTS:
        if isinstance(schema.get(key), float) and schema[key].is_integer():
            schema[key] = int(schema[key])
    _replace_unevaluated(schema)
    return schema


def may_repeat_keys(schema: Any) -> bool:
    r"""Whether an object may have other keys beside those that it names.

    NOTE: the compiler lets `"\u0061"` be such a key, though it is "a" again.
    """
    found: list[bool] = []
    if not isinstance(schema, dict):
        return False
    map_schemas(schema, lambda inner: found.append(may_repeat_keys(inner)))
    is_open = schema.get("additionalProperties", True) is not False
    return any(found) or (is_open and any(schema.get(key) for key in ("properties", "required")))


def _has(key: str, *values: Any) -> Callable[[dict[str, Any]], bool]:
    """Whether a keyword has one of the values; true and 1 differ."""
    return lambda schema: any(schema[key] == value and type(schema[key]) is type(value) for value in values)


def _lacks(*keys: str) -> Callable[[dict[str, Any]], bool]:
    return lambda schema: not any(key in schema for key in keys)


def _counts_nothing(schema: dict[str, Any]) -> bool:
    """Whether `contains` and its bounds hold for any array."""
    return "contains" not in schema or (schema.get("minContains", 1) == 0 and "maxContains" not in schema)


def _is_short(schema: dict[str, Any]) -> bool:
    return schema["uniqueItems"] is False or schema.get("maxItems") in (0, 1)


def _requires_nothing(schema: dict[str, Any]) -> bool:
    required = schema["dependentRequired"]
    return isinstance(required, dict) and not any(required.values())


_IDLE: dict[str, Callable[[dict[str, Any]], bool]] = {  # keyword -> whether it has no effect; in this order
    "format": lambda schema: schema["format"] not in FORMATS if isinstance(schema["format"], str) else False,
    "uniqueItems": _is_short,
    "minContains": _counts_nothing,
    "maxContains": _lacks("contains"),
    "contains": lambda schema: schema.get("minContains", 1) == 0 and "maxContains" not in schema,
    "then": _lacks("if"),
    "else": _lacks("if"),
    "if": _lacks("then", "else"),
    "not": _has("not", False),
    "dependentRequired": _requires_nothing,
    "dependentSchemas": _has("dependentSchemas", {}),
    "dependencies": _has("dependencies", {}),
    "propertyNames": _has("propertyNames", True, {}, {"type": "string"}),
    "unevaluatedItems": _has("unevaluatedItems", True, {}),
    "additionalItems": lambda schema: not isinstance(schema.get("items"), list),
    "$vocabulary": lambda schema: True,
    "$recursiveAnchor": _lacks("$recursiveRef"),
    "$dynamicAnchor": _lacks("$dynamicRef"),
}


def _replace_unevaluated(schema: dict[str, Any]) -> None:
    """Replaces `unevaluated...`, in place, where there is nothing that could have evaluated a part elsewhere."""
    if schema.get("unevaluatedProperties", False) in (True, {}) and "unevaluatedProperties" in schema:
        del schema["unevaluatedProperties"]
        schema.setdefault("additionalProperties", True)
    if any(key in schema for key in APPLICATORS):
        return
    for key, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if key in schema:
            schema.setdefault(plain, schema.pop(key))


# -- patterns


def with_safe_patterns(schema: Any) -> Any:
    """The schema with each pattern as `safe_pattern` has it."""
    if not isinstance(schema, dict):
        return schema
    schema = map_schemas(schema, with_safe_patterns)
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = safe_pattern(schema["pattern"])
    if isinstance(schema.get("patternProperties"), dict):
        schema["patternProperties"] = {
            safe_pattern(pattern): inner for pattern, inner in schema["patternProperties"].items()
        }
    return schema


def safe_pattern(pattern: str) -> str:
    r"""The pattern with U+0000 taken out of classes that hold all control characters, but not both of `"` and `\`.

    NOTE: in a JSON string the compiler takes a class with all characters below U+0020 for one that holds any escape, so
    `[^"]` would match `\"`. Without one of them it takes the class as it is.
    """
    return "".join(f"[{part}&&[^\\x00]]" if _takes_any_escape(part) else part for part in _classes_and_rest(pattern))


_SET_OPERATION = re.compile(r"\[|&&|--|~~|\|\|")


def _classes_and_rest(pattern: str) -> Iterator[str]:
    """The pattern in pieces: bracketed classes and `\\p{...}` whole, the rest by character or escape."""
    at = 0
    while at < len(pattern):
        start, at = at, _end_of_piece(pattern, at)
        yield pattern[start:at]


def _end_of_piece(pattern: str, at: int) -> int:
    if pattern[at] == "\\":
        named = re.compile(r"\\[pP]\{[^}]*\}").match(pattern, at)
        return named.end() if named else at + 2
    if pattern[at] != "[":
        return at + 1
    depth, at = 1, at + (2 if pattern.startswith("[^", at) else 1)
    while at < len(pattern) and depth:
        if pattern[at] == "\\":
            at += 1
        else:
            depth += {"[": 1, "]": -1}.get(pattern[at], 0)
        at += 1
    return at


def _takes_any_escape(piece: str) -> bool:
    """Whether a piece is a class with all control characters, a line feed perhaps excepted, but not with `"` and `\\`.

    True as well for a class whose members Python cannot tell.
    """
    if piece[:3] in (r"\p{", r"\P{"):
        return True
    if piece[0] != "[" or len(piece) < 3:
        return False
    if _SET_OPERATION.search(re.sub(r"\\.", "", piece[1:])):
        return True
    try:
        one = re.compile(piece)
    except (re.error, RecursionError, OverflowError):
        return True
    holds_controls = all(one.fullmatch(chr(code)) for code in range(32) if code != 10)
    return holds_controls and not (one.fullmatch('"') and one.fullmatch("\\"))
