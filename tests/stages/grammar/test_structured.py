"""The form of an answer as text: exactly one kind, of a bounded size, refused by the name of its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millrace.stages import SamplingParams, StructuredOutputs
from millrace.stages.errors import Refused


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "has none: must have exactly one of json, regex, choice, grammar, json_object"),
        ({"regex": "a", "choice": ("b",)}, "has regex, choice: must have exactly one"),
        ({"json": False}, "json = false: must be another schema"),
        ({"json": "[1]"}, "json must be a JSON schema: an object, or true"),
        ({"json": "{"}, "json is not JSON: "),
        ({"json": '{"const":NaN}'}, "json is not JSON: NaN"),
        ({"json": '{"const":1e400}'}, "json holds a number that is too large"),
        ({"json": '{"items":' * 5000 + "{}" + "}" * 5000}, "json is nested more than 32 deep"),
        ({"json": _nested(33)}, "json is nested more than 32 deep"),
        ({"json": {"items": object()}}, "json is not JSON"),
        ({"json": json.dumps({"const": "a" * 65536})}, "json has 65549 bytes: at most 65536"),
        ({"json": {"const": "a" * 65536}}, "json has 65548 bytes: at most 65536"),
        ({"json": {"const": "\ud800"}}, "json holds an unpaired surrogate (U+D800)"),
        ({"regex": ""}, "regex must be text, and not empty"),
        ({"regex": "a" * 1025}, "regex has 1025 bytes: at most 1024"),
        ({"grammar": "a" * 65537}, "grammar has 65537 bytes: at most 65536"),
        ({"choice": ()}, "choice must be a list of 1 to 1024 strings"),
        ({"choice": ("a",) * 1025}, "choice must be a list of 1 to 1024 strings"),
        ({"choice": ("a", 1)}, "choice must be text, and not empty"),
        ({"choice": ("é" * 20_000, "é" * 20_000)}, "choice has 80000 bytes in all: at most 65536"),
        ({"json_object": 1}, "json_object must be true or false"),
        ({"json_object": True, "disable_any_whitespace": 1}, "disable_any_whitespace must be true or false"),
    ],
)
def test_what_is_wrong_is_refused_by_the_name_of_its_field(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(Refused) as refused:
        StructuredOutputs(**given)
    assert complaint in refused.value.message and refused.value.message.startswith("structured_outputs")
    assert refused.value.param == "structured_outputs" and refused.value.status == 400
    assert len(refused.value.message) < 200


def test_a_schema_becomes_text_with_its_keys_in_their_order() -> None:
    schema = {"type": "object", "properties": {"b": {"const": "é"}, "a": True}}
    structured = StructuredOutputs(json=schema)
    assert structured.json == '{"type":"object","properties":{"b":{"const":"é"},"a":true}}'
    assert structured == StructuredOutputs(json=json.dumps(schema)) and len({structured, structured}) == 1


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"json": True}, "json"),
        ({"json": _nested(32)}, "json"),
        ({"regex": "a" * 1024}, "regex"),
        ({"choice": ["a", "b"], "json_object": False}, "choice"),
        ({"grammar": "start: /a/"}, "grammar"),
        ({"json_object": True}, "json_object"),
    ],
)
def test_one_kind_may_be_asked_for(given: dict[str, Any], kind: str) -> None:
    structured = StructuredOutputs(**given)
    assert structured.kind == kind
    assert SamplingParams(structured_outputs=structured).structured_outputs is structured
