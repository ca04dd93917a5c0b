"""What an answer may be under a JSON schema: closed objects, idle keywords, patterns to the letter."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from llguidance import LLMatcher

from millrace.model.schema.schema_closing import closed
from millrace.model.text.grammar import GrammarError
from tests.model.text.grammar_checks import accepts, holds, matcher_of

INT = {"type": "integer"}


def obj(*names: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: INT for name in names}, **more}


# -- objects that do not say whether other keys may follow


@pytest.mark.parametrize(
    ("schema", "fits", "invented"),
    [
        (obj("a"), {"a": 1}, {"a": 1, "b": 1}),
        (obj(), {}, {"b": 1}),
        ({"properties": {"a": obj("b")}}, {"a": {"b": 1}}, {"a": {"b": 1, "c": 1}}),
        ({"type": "array", "items": obj("a")}, [{"a": 1}], [{"c": 1}]),
        ({"anyOf": [obj("a"), {"type": "null"}]}, {"a": 1}, {"c": 1}),
        ({"$ref": "#/$defs/x", "$defs": {"x": obj("a")}}, {"a": 1}, {"a": 1, "c": 1}),
        ({"allOf": [{"$ref": "#/$defs/x"}], "title": "t", "$defs": {"x": obj("a")}}, {"a": 1}, {"c": 1}),
        ({"allOf": [{"$ref": "#/$defs/x"}, obj("b")], "$defs": {"x": obj("a")}}, {"a": 1, "b": 1}, {"a": 1, "c": 1}),
        ({"$ref": "#/$defs/x", "required": ["a"], "$defs": {"x": obj("a")}}, {"a": 1}, {"a": 1, "c": 1}),
        (obj("k", anyOf=[obj("a"), obj("b")]), {"k": 1, "b": 1}, {"k": 1, "c": 1}),
        (obj("k", anyOf=[{"required": ["k"]}, {"required": ["m"]}]), {"k": 1}, {"k": 1, "c": 1}),
        (obj("a", required=["a", "z"]), {"a": 1, "z": "any"}, {"a": 1, "z": 1, "c": 1}),
        (obj("a", unevaluatedProperties=False), {"a": 1}, {"c": 1}),
        ({"allOf": [obj("a"), obj("b")], "unevaluatedProperties": False}, {"a": 1, "b": 2}, {"c": 1}),
        ({"type": "object", "patternProperties": {"^x": INT}}, {"x1": 1}, {"c": 1}),
        (obj("a", minProperties=1), {"a": 1}, {"c": 1}),
    ],
    ids=range(16),
)
def test_an_object_that_names_its_keys_has_no_others(schema: Any, fits: Any, invented: Any) -> None:
    matcher = matcher_of(schema)
    assert accepts(matcher, json.dumps(fits)) and not accepts(matcher, json.dumps(invented))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        True,
        obj("a", additionalProperties=True),
        obj("a", additionalProperties={"type": "integer"}),
        obj("a", unevaluatedProperties=True),
        {"allOf": [obj("a", additionalProperties=True), obj("b")]},
        {"allOf": [obj("b"), {"anyOf": [obj("c"), obj("a")]}]},
        obj("a", minProperties=2, required=["a"]),
        obj("a", additionalProperties=True, allOf=[obj("b")]),
    ],
)
def test_an_object_that_says_so_or_names_none_stays_open(schema: Any) -> None:
    assert holds(schema, {"a": 1, "c": 5})


def test_a_definition_that_is_used_alone_and_as_a_part_is_closed_only_alone() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    schema = {"allOf": [{"$ref": "#/$defs/node"}, obj("b")], "$defs": {"node": node}}
    assert holds(schema, {"next": {"next": {}}, "b": 1})
    assert not holds(schema, {"next": {"b": 1}, "b": 1})
    assert closed(schema)["$defs"]["node"]["additionalProperties"] is False


def test_an_escaped_key_is_no_way_to_write_a_key_twice() -> None:
    for more in (True, {"type": "string"}):
        matcher = matcher_of(obj("a", required=["a"], additionalProperties=more))
        assert accepts(matcher, '{"a":1,"b":"x"}') and not accepts(matcher, r'{"a":1,"\u0061":"x"}')


# -- keywords without effect

IDLE: list[tuple[Any, Any]] = [
    *(({"type": "string", "format": name}, "x") for name in ("password", "byte", "binary", "uri-reference", "regex")),
    *(({"type": "integer", "format": name}, 5) for name in ("int32", "int64")),
    ({"type": "number", "format": "double"}, 1.5),
    ({"type": "array", "uniqueItems": False}, [1, 1]),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, [1]),
    ({"type": "string", "minLength": 2.0, "maxLength": 3.0}, "ab"),
    ({"type": "array", "minItems": 1.0, "maxItems": 2.0, "items": INT}, [1]),
    ({"type": "object", "minProperties": 0.0}, {}),
    ({"type": "array", "minContains": 1, "maxContains": 1}, []),
    ({"type": "array", "contains": INT, "minContains": 0}, ["x"]),
    ({"type": "string", "then": INT, "else": INT}, "x"),
    ({"type": "string", "if": INT}, "x"),
    ({"type": "string", "not": False}, "x"),
    (obj("a", dependentRequired={}), {"a": 1}),
    (obj("a", dependentRequired={"a": []}, dependentSchemas={}, dependencies={}), {"a": 1}),
    (obj("a", propertyNames={"type": "string"}), {"a": 1}),
    ({"type": "array", "unevaluatedItems": True}, [1]),
    ({"type": "array", "prefixItems": [INT], "unevaluatedItems": False}, [1]),
    ({"type": "array", "items": INT, "additionalItems": False}, [1, 2]),
    ({"type": "string", "deprecated": True, "examples": ["a"], "contentSchema": {}, "$vocabulary": {}}, "x"),
    ({"type": "string", "$dynamicAnchor": "x", "$recursiveAnchor": True}, "x"),
    (obj("format", "uniqueItems", "not"), {"format": 1, "uniqueItems": 2, "not": 3}),
]


@pytest.mark.parametrize(("schema", "value"), IDLE, ids=range(len(IDLE)))
def test_annotations_and_defaults_constrain_nothing(schema: Any, value: Any) -> None:
    assert holds(schema, value)


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": INT}, "contains"),
        ({"type": "array", "contains": INT, "minContains": 0, "maxContains": 1}, "contains"),
        ({"type": "string", "if": {}, "then": INT}, "if"),
        ({"type": "string", "not": {}}, "not"),
        (obj("a", dependentRequired={"a": ["b"]}), "dependentRequired"),
        (obj("a", propertyNames={"maxLength": 2}), "propertyNames"),
        ({"type": "string", "minLength": 2.5}, "minLength"),
    ],
)
def test_what_would_constrain_an_answer_is_still_refused_by_its_name(schema: Any, word: str) -> None:
    with pytest.raises(GrammarError, match=word):
        matcher_of(schema)


def test_the_formats_that_are_enforced_are_those_that_the_page_lists() -> None:
    for name, wrong in (("date", "2020-13-01"), ("ipv4", "1.2.3"), ("uuid", "x"), ("email", "x"), ("uri", "x")):
        assert not holds({"type": "string", "format": name}, wrong)


# -- patterns


def characters(matcher: LLMatcher) -> set[int]:
    """The code points below 256 that a string of one character may be, however it is spelled."""
    spellings = {code: {json.dumps(chr(code)), json.dumps(chr(code), ensure_ascii=False)} for code in range(256)}
    return {code for code, texts in spellings.items() if any(accepts(matcher, text) for text in texts)}


@pytest.mark.parametrize(
    "group",
    [
        r"[\u0000-\u001f]",
        '[^"]',
        r"[^\\]",
        r'[^"\\]',
        r'[^\\/:*?"<>|]',
        r'[^\n"]',
        r"[\u0000-!]",
        r'[^\]"]',
        r'(a|[^"])',
    ],
)
def test_a_class_of_control_characters_holds_no_other_escape(group: str) -> None:
    """U+0000 excepted, an answer may have exactly the characters of the class."""
    expected = {code for code in range(1, 256) if re.fullmatch(group, chr(code))}
    assert characters(matcher_of({"type": "string", "pattern": f"^{group}$"})) == expected
    key = {"type": "object", "patternProperties": {f"^{group}$": INT}}
    for code, text in ((34, r'{"\"":1}'), (92, r'{"\\":1}')):
        assert accepts(matcher_of(key), text) == (code in expected)


@pytest.mark.parametrize("group", [r"\W", "[^a-z]", ".", r"[^\x00-\x1f]", "[ -~]", r"[\n\t]", r"[\]\[]"])
def test_other_classes_are_left_as_they_are(group: str) -> None:
    expected = {code for code in range(256) if re.fullmatch(group, chr(code), re.ASCII)}
    assert characters(matcher_of({"type": "string", "pattern": f"^{group}$"})) == expected


# -- the dialect


@pytest.mark.parametrize("name", ["draft/2020-12", "draft/2019-09", "draft-07", "draft-06", "draft-04", "draft-03"])
def test_a_schema_may_name_its_dialect(name: str) -> None:
    scheme = "https" if "/" in name else "http"
    for end in ("", "#"):
        assert holds({"$schema": f"{scheme}://json-schema.org/{name}/schema{end}", **INT}, 1)


@pytest.mark.parametrize("name", ["https://example.com/x", "http://json-schema.org/schema#", "draft-07"])
def test_an_unknown_dialect_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(
        GrammarError, match=r"has \$schema = .*not known: leave it out, or use one of .*draft-07/schema"
    ):
        matcher_of({"$schema": name, **INT})
