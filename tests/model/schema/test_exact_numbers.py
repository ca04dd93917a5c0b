"""Numbers in JSON schemas, to the letter: values and bounds of more than 53 bits, in answers of any shape."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from millrace.model.schema.exact_numbers import with_nearer_bounds
from millrace.model.text.grammar import GrammarError
from tests.counts import count
from tests.model.text.grammar_checks import accepts, holds, matcher_of, write

ID = 1234567890123456789
NUM_ANSWERS = count(12, 200)


@pytest.mark.parametrize("value", [ID, -ID, 2**53 + 1, 2**64 - 1, -(2**63), 10**21 + 1, 0.1, 1e-7, -2.5e-300, 1e22])
@pytest.mark.parametrize("keyword", ["const", "enum"])
def test_a_number_is_written_to_the_letter_and_no_other(keyword: str, value: float) -> None:
    matcher = matcher_of({keyword: value if keyword == "const" else [value, "other"]})
    draw = random.Random(0)
    written = {write(matcher, draw) for _ in range(10)} - {'"other"'}
    assert [json.loads(text or "null") for text in written] == [value]


@pytest.mark.parametrize("bound", [2**53 + 1, 2**63 - 1, 2**64 - 1, 10**30 + 7, -(2**53) - 1, -ID])
def test_bounds_are_exact_at_any_size(bound: int) -> None:
    for kind in ("integer", "number"):
        near = [bound - 1, bound, bound + 1]
        for keyword, fits in (
            ("minimum", [False, True, True]),
            ("exclusiveMinimum", [False, False, True]),
            ("maximum", [True, True, False]),
            ("exclusiveMaximum", [True, False, False]),
        ):
            assert [holds({"type": kind, keyword: bound}, value) for value in near] == fits, (kind, keyword)


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"type": "number", "minimum": 1e21}, "1000000000000000000000", "999999999999999999999"),
        ({"type": "number", "maximum": 1e21}, "1000000000000000000000.0", "1000000000000000000001"),
        ({"type": "number", "minimum": 1e-7, "maximum": 1e21}, "0.0000001", "0.00000009"),
        ({"type": "number", "exclusiveMinimum": 1e-7, "maximum": 1e21}, "0.00000010001", "0.0000001"),
        ({"type": "integer", "minimum": 1e-7, "maximum": 1e21}, "1", "0"),
        ({"minimum": 2**63, "exclusiveMinimum": True}, "9223372036854775809", "9223372036854775808"),
        ({"minimum": 2**63}, '"text"', "1"),
        ({"type": ["integer", "null"], "maximum": -(2**60) - 1}, "null", str(-(2**60))),
    ],
)
def test_a_bound_may_be_tiny_or_huge(schema: dict[str, Any], inside: str, outside: str) -> None:
    matcher = matcher_of(schema)
    assert accepts(matcher, inside) and not accepts(matcher, outside)


BIG = {"enum": [ID, -ID]}
SHAPES: dict[str, dict[str, Any]] = {
    "optional keys": {
        "type": "object",
        "properties": {
            "a": {"type": "boolean"},
            "id": BIG,
            "größe": {"enum": ["s", "ü"]},
            "ids": {"type": "array", "items": BIG},
        },
        "required": ["größe"],
    },
    "other keys": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "additionalProperties": BIG,
    },
    "arrays": {"type": "array", "items": BIG, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [BIG, {"type": "null"}], "items": False, "minItems": 1},
    "tuple and others": {"type": "array", "prefixItems": [{"type": "null"}], "items": BIG, "maxItems": 3},
    "at most one": {"type": "array", "items": BIG, "maxItems": 1},
    "alternatives": {"anyOf": [BIG, {"type": "null"}, {"type": "object", "properties": {"id": BIG}}]},
    "disjoint alternatives": {"oneOf": [BIG, {"const": 2**60}, {"type": "null"}]},
    "recursion": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"id": {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 9}, "next": {}},
                "required": ["id"],
            }
        },
        "allOf": [{"$ref": "#/$defs/node"}],
        "description": "a node",
    },
    "nested values": {"enum": [{"id": ID, "of": [-ID, None, "é"]}, [], 2**70]},
    "of a type": {"type": "integer", "enum": ["x", ID, 1.5, None]},
    "beside others": {
        "type": "object",
        "properties": {"s": {"type": "string", "pattern": '^[^"]{0,3}$'}, "n": BIG},
        "required": ["n"],
    },
}
SHAPES["recursion"]["$defs"]["node"]["properties"]["next"] = {"$ref": "#/$defs/node"}


@pytest.mark.parametrize("is_compact", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_is_written_around_such_a_number_is_valid(shape: str, is_compact: bool) -> None:
    schema, draw = SHAPES[shape], random.Random(shape)
    matcher = matcher_of(schema, is_compact)
    written = [text for text in (write(matcher, draw) for _ in range(NUM_ANSWERS)) if text is not None]
    assert written
    for text in written:
        Draft202012Validator(schema).validate(json.loads(text))
        if is_compact and shape != "other keys":  # of which the same may come twice
            assert text == json.dumps(json.loads(text), ensure_ascii=False) or "\\" in text
    assert any(str(ID) in text or str(2**53)[:-2] in text for text in written)


def test_what_cannot_be_held_beside_a_number_is_refused_by_its_name() -> None:
    for schema, name in (
        ({"allOf": [{"enum": [ID]}, {"type": "integer"}]}, "allOf of several schemas"),
        ({"oneOf": [{"enum": [ID]}, {"type": "integer"}]}, "oneOf of schemas that may overlap"),
        ({"type": "object", "properties": {"a": {"enum": [ID]}}, "minProperties": 1}, "minProperties"),
    ):
        with pytest.raises(GrammarError, match=f"number of more than 53 bits, .* together with {name}"):
            matcher_of(schema)


def test_where_exact_bounds_cannot_be_held_nearer_ones_are() -> None:
    schema = {"allOf": [{"type": "integer", "maximum": 2**63 - 1}, {"multipleOf": 2, "minimum": -(2**63)}]}
    (most, least) = with_nearer_bounds(schema)["allOf"]
    assert most["maximum"] == 2**63 - 1024 and least["minimum"] == -(2**63) + 1024
    assert holds(schema, 2**62) and not holds(schema, 2**62 + 1) and not holds(schema, 2**63)
