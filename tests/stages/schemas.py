"""JSON schemas of ten families, nested at random. Each is satisfiable, and within what structured outputs take."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
MAX_DEPTH = 3


def make_schema(family: str, seed: int) -> Schema:
    """The schema of a family and a seed, the same in every process."""
    return FAMILIES[family](random.Random(f"{family}/{seed}"), 0)


def _part(draw: random.Random, depth: int) -> Schema:
    """Anything, and the simpler the deeper."""
    simple = ("scalars", "enums", "texts", "numbers")
    names = simple if depth >= MAX_DEPTH else tuple(FAMILIES)
    return FAMILIES[draw.choice(names)](draw, depth)


def _scalars(draw: random.Random, depth: int) -> Schema:
    return {"type": draw.choice(["boolean", "null", "integer"])}


def _enums(draw: random.Random, depth: int) -> Schema:
    values: list[Any] = ["red", "grün", 'a "quoted" one', "", "🙂", 3, -1.5, True, None, {"a": [1, "x"]}, []]
    if draw.random() < 0.3:
        return {"const": draw.choice(values)}
    return {"enum": draw.sample(values, draw.randint(1, 5))}


def _texts(draw: random.Random, depth: int) -> Schema:
    kinds: list[Schema] = [
        {"maxLength": draw.randint(0, 12)},
        {"minLength": 2, "maxLength": draw.randint(2, 9)},
        {"pattern": draw.choice(["^[a-f]{2,5}$", "^(ab|cd)+[0-9]?$", "^\\d{3}-\\d{4}$", "^[A-Z][a-z]{0,8}$"])},
        {"format": draw.choice(["date", "uuid", "ipv4"])},
    ]
    return {"type": "string"} | draw.choice(kinds)


def _numbers(draw: random.Random, depth: int) -> Schema:
    low = draw.randint(-1000, 1000)
    kinds: list[Schema] = [
        {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 500)},
        {"type": "integer", "exclusiveMinimum": low, "maximum": low + 1 + draw.randint(0, 9)},
        {"type": "number", "minimum": low, "maximum": low + draw.randint(1, 500)},
        {"type": "integer", "multipleOf": draw.choice([2, 5, 10]), "minimum": 0, "maximum": 1000},
    ]
    return draw.choice(kinds)


def _arrays(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    return {"type": "array", "items": _part(draw, depth + 1), "minItems": least, "maxItems": least + draw.randint(0, 2)}


def _tuples(draw: random.Random, depth: int) -> Schema:
    items = [_part(draw, depth + 1) for _ in range(draw.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _objects(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(["name", "größe", "a b", "x", "y", "tags", "$id_", "日本"], draw.randint(1, 4))
    required = [name for name in names if draw.random() < 0.7]
    properties = {name: _part(draw, depth + 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _unions(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_part(draw, depth + 1) for _ in range(draw.randint(2, 3))]}


def _maps(draw: random.Random, depth: int) -> Schema:
    """Keys that the schema does not name, beside one that it does."""
    if draw.random() < 0.5:
        named = {"properties": {"kind": {"const": "map"}}, "required": ["kind"]}
        return {"type": "object", **named, "additionalProperties": {"type": ["integer", "null"]}}
    return {"type": "object", "patternProperties": {"^[a-c]{1,3}$": {"type": "boolean"}}, "additionalProperties": False}


def _references(draw: random.Random, depth: int) -> Schema:
    """A list that refers to itself, or a part that is defined once and used twice."""
    name = f"node{depth}_{draw.randint(0, 99)}"
    if depth:  # definitions live at the root, and this is none
        return _objects(draw, depth)
    here = {"$ref": f"#/$defs/{name}"}
    if draw.random() < 0.5:
        node = {"value": _part(draw, 2), "next": {"anyOf": [{"type": "null"}, here]}}
        definition: Schema = {"type": "object", "properties": node, "required": ["value", "next"]}
    else:
        definition = {"type": "object", "properties": {"of": _part(draw, 1)}, "required": ["of"]}
        here = {"type": "array", "items": here, "minItems": 1, "maxItems": 2}
    return {"$defs": {name: definition | {"additionalProperties": False}}, **here}


FAMILIES: dict[str, Callable[[random.Random, int], Schema]] = {
    "scalars": _scalars,
    "enums": _enums,
    "texts": _texts,
    "numbers": _numbers,
    "arrays": _arrays,
    "tuples": _tuples,
    "objects": _objects,
    "unions": _unions,
    "maps": _maps,
    "references": _references,
}
