"""Fields that constrain the output format, by OpenAI's and vLLM's names: meaning and errors."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.deploy.api.chat.body import ChatBody
from millrace.deploy.api.completions.body import CompletionBody
from millrace.deploy.api.schema.validation import read_body
from millrace.deploy.errors import ApiError
from millrace.stages import SamplingParams, StructuredOutputs

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
A_FIRST = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"]}
KINDS = [(ChatBody, {"messages": [{"role": "user", "content": "hi"}]}), (CompletionBody, {"prompt": "hi"})]


def form(kind: Any = KINDS[1], **fields: Any) -> StructuredOutputs | None:
    body, ignored = read_body(kind[0], kind[1] | fields, True)
    assert not ignored
    return body.sampling_params(SamplingParams()).structured_outputs


def format_of(**wrapped: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": wrapped}


@pytest.mark.parametrize("kind", KINDS, ids=["chat", "completions"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": {}}, None),
        ({"structured_outputs": {"json": None, "disable_fallback": True}, "guided_choice": []}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        ({"response_format": format_of(name="x", schema=SCHEMA, strict=False)}, StructuredOutputs(json=SCHEMA)),
        (
            {"response_format": format_of(name="x", schema=SCHEMA | {"required": ["a"]}, strict=True)},
            StructuredOutputs(json=A_FIRST, disable_any_whitespace=True),
        ),
        ({"response_format": format_of(name="x", schema=SCHEMA, description="?")}, StructuredOutputs(json=SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json=SCHEMA)),
        ({"structured_outputs": {"json": '{"type":"object"}'}}, StructuredOutputs(json={"type": "object"})),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutputs(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=("a", "b"))),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredOutputs(grammar='start: "a"')),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            StructuredOutputs(json_object=True, disable_any_whitespace=True),
        ),
        ({"guided_json": SCHEMA}, StructuredOutputs(json=SCHEMA)),
        ({"guided_regex": "a+"}, StructuredOutputs(regex="a+")),
        ({"guided_choice": ["a"]}, StructuredOutputs(choice=("a",))),
        ({"guided_grammar": 'root ::= "a"'}, StructuredOutputs(grammar='root ::= "a"')),
    ],
)
def test_every_name_of_a_form_is_understood(kind: Any, fields: dict[str, Any], expected: object) -> None:
    assert form(kind, **fields) == expected


@pytest.mark.parametrize("kind", KINDS, ids=["chat", "completions"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": format_of(schema=SCHEMA)}, "response_format.json_schema.name"),
        ({"response_format": format_of(name="a b", schema=SCHEMA)}, "response_format.json_schema.name"),
        ({"response_format": format_of(name="a" * 65, schema=SCHEMA)}, "response_format.json_schema.name"),
        ({"response_format": format_of(name="x")}, "response_format.json_schema.schema"),
        ({"response_format": format_of(name="x", schema="{}")}, "response_format.json_schema.schema"),
        ({"response_format": format_of(name="x", schema={}, strict="yes")}, "response_format.json_schema.strict"),
        ({"response_format": format_of(name="x", schema={}, strict=0)}, "response_format.json_schema.strict"),
        ({"response_format": format_of(name="x", schema={"const": "a" * 65536})}, "response_format"),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": "abc"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": 0, "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": False, "json_object": True}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": 0, "choice": ["b"]}}, "structured_outputs"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_regex": {}}, "guided_regex"),
        ({"guided_grammar": []}, "guided_grammar"),
        ({"guided_choice": ""}, "guided_choice"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"guided_json": {"a": 1}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_what_is_no_form_is_refused_by_the_name_of_its_field(kind: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        form(kind, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(param) and len(caught.value.message) < 200


def test_a_form_makes_no_sense_in_a_beam_search() -> None:
    with pytest.raises(ApiError, match="response_format: not supported by a beam search") as caught:
        form(use_beam_search=True, response_format={"type": "json_object"})
    assert caught.value.param == "response_format"
