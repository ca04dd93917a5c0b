"""Tools in requests: errors and the field they name, the template's input, forced calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millrace.deploy.api.chat.body import ChatBody
from millrace.deploy.api.schema.validation import read_body
from millrace.deploy.errors import ApiError
from millrace.stages.params import SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]
NAMED = {"type": "function", "function": {"name": "f"}}


def tool(name: Any = "f", **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"} | parameters}}


def chat(**fields: Any) -> ChatBody:
    return read_body(ChatBody, {"messages": MESSAGES} | fields, False)[0]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({}, "tools[1].type"),
        ({"type": "web_search"}, "tools[1].type"),
        ({"type": "function"}, "tools[1].function"),
        ({"type": "function", "function": {"name": "f"}, "x": 1}, "tools[1].function.name"),  # twice
        *[(tool(name), "tools[1].function.name") for name in ('a"b', "a\nb", "", "a b", "x" * 129, 5, "ü", None)],
        *[
            (tool("g", **schema), "tools[1].function.parameters")
            for schema in (
                {"type": "strin"},
                {"type": "string"},
                {"properties": {"a": {"type": "text"}}},
                {"properties": {"a": {"type": ["string", 5]}}},
                {"properties": {"a": {"items": {"anyOf": [{"type": "x"}]}}}},
                {"$defs": {"d": {"pattern": "("}}},
                {"properties": {"a": {"pattern": "[z-a]"}}},
                {"properties": {"a": {"pattern": "a" * 1025}}},
                {"properties": {"a": {"pattern": "(" * 500 + ")" * 500}}, "type": "array"},
                {"properties": {"a": {"pattern": 5}}},
                {"patternProperties": {"*": {}}},
            )
        ],
    ],
)
def test_a_wrong_tool_is_refused_by_its_place(wrong, param):
    with pytest.raises(ApiError) as caught:
        chat(tools=[tool(), wrong])
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(param)


def test_more_than_1024_tools_are_refused_by_the_first_too_many():
    chat(tools=[tool(f"f{i}") for i in range(1024)])
    with pytest.raises(ApiError, match=r"tools: must have at most 1024 entries, so tools\[1024\] is too many"):
        chat(tools=[{}] * 10_000)


def test_what_other_dialects_of_patterns_know_is_taken():
    chat(tools=[tool(properties={"a": {"type": "string", "pattern": pattern}}) for pattern in (r"^\p{L}+\.x$",)])
    schema = {"properties": {"pattern": {"const": {"type": "x"}}, "type": {"type": ["string", "null"]}}}
    assert chat(tools=[tool(**schema)]).tools is not None, "properties may be called type and pattern"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice = 'required': requires tools"),
        ({"tool_choice": NAMED}, "must name a function in tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [tool()]}, "tool_choice = 'g'"),
        ({"tool_choice": "always", "tools": [tool()]}, "must be none, auto, required or"),
        ({"tool_choice": {"type": "function"}, "tools": [tool()]}, "must be none, auto, required or"),
        ({"tool_choice": ["auto"], "tools": [tool()]}, "must be none, auto, required or"),
        ({"tool_choice": 5}, "must be none, auto, required or"),
    ],
)
def test_a_choice_of_what_is_not_there_is_refused(fields, message):
    with pytest.raises(ApiError, match=message) as caught:
        chat(**fields)
    assert caught.value.param == "tool_choice"


def test_the_older_fields_are_refused_with_the_newer_ones_named():
    for field, instead in (("functions", "send tools"), ("function_call", "send tools and tool_choice")):
        with pytest.raises(ApiError, match=instead) as caught:
            chat(**{field: [{"name": "f"}]})
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", field)


# -- the template's input


def prompt(**fields: Any) -> Any:
    return chat(**fields).prompts()[0].chat


def test_the_template_gets_the_tools_that_may_be_called_and_nothing_else_of_them():
    given = tool() | {"extra": 1}
    given["function"] |= {"strict": True, "description": "does it"}
    expected = {"name": "f", "description": "does it", "parameters": {"type": "object"}}
    assert prompt(tools=[given]).tools == ({"type": "function", "function": expected},)
    assert prompt(tools=[given], tool_choice="none").tools == ()
    assert prompt().tools == ()


def test_turns_of_tools_and_calls_reach_the_template():
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "assistant", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "2"}]},
    ]
    _, first, second, result = prompt(messages=turns).messages
    assert (
        first
        == second
        == {
            "role": "assistant",
            "tool_calls": [call],
            "reasoning": "hm",
            "reasoning_content": "hm",
        }
    )
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "2"}]}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": None}, "content"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}, "content"),
        ({"role": "tool", "tool_call_id": "1"}, "content"),
        ({"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}, "tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            "tool_calls[0].function.arguments",
        ),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "a" * 1025}}]}, "tool_calls[0].function.name"),
        ({"role": "function", "content": "x"}, "role"),
    ],
)
def test_a_wrong_turn_is_refused_by_its_place(message, param):
    with pytest.raises(ApiError) as caught:
        chat(messages=[*MESSAGES, message])
    assert (caught.value.status, caught.value.param) == (400, f"messages[1].{param}")


@pytest.mark.parametrize(
    ("turn", "content"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": None, "tool_calls": []}, ""),
        ({"content": None, "reasoning": "hm", "tool_calls": None}, ""),
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
        ({"content": "a", "refusal": None}, "a"),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, [{"type": "text", "text": "no"}]),
    ],
)
def test_an_assistants_turn_without_content_reaches_the_template_as_text(turn, content):
    body, _ = read_body(ChatBody, {"messages": [*MESSAGES, {"role": "assistant", **turn}, *MESSAGES]}, False)
    (made,) = body.prompts()
    message = made.chat.messages[1]
    assert message["content"] == content and not {"tool_calls", "refusal"} & message.keys()


def test_the_older_form_of_a_call_is_refused_and_not_dropped():
    for name, value in (("function_call", {"name": "f", "arguments": "{}"}), ("prefix", True)):
        with pytest.raises(ApiError, match=name) as caught:
            chat(messages=[*MESSAGES, {"role": "assistant", "content": "", name: value}])
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "messages[1]")
        chat(messages=[*MESSAGES, {"role": "assistant", "content": "", name: None}])


def test_effort_reaches_the_template_and_none_switches_thoughts_off():
    assert prompt(reasoning_effort="low").template_kwargs == {"reasoning_effort": "low"}
    off = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    assert prompt(reasoning_effort="none").template_kwargs == off
    mine = {"enable_thinking": True}
    assert prompt(reasoning_effort="none", chat_template_kwargs=mine).template_kwargs == off | mine
    assert prompt(tools=[tool()], tool_choice="required").template_kwargs == {}, "thoughts may come before"
    assert prompt(response_format={"type": "text"}).template_kwargs == {}


# -- forced calls


def schema(**fields: Any) -> Any:
    structured = chat(**fields).sampling_params(SamplingParams()).structured_outputs
    return None if structured is None else json.loads(str(structured.json))


def test_a_named_tool_makes_the_answer_its_arguments():
    tools = [tool("g"), tool("f", properties={"a": {"type": "integer"}}, required=["a"])]
    assert schema(tools=tools, tool_choice=NAMED) == tools[1]["function"]["parameters"]
    bare = {"type": "function", "function": {"name": "f"}}
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    assert schema(tools=[bare], tool_choice=NAMED) == nothing
    assert schema(tools=tools) is None and schema(tools=tools, tool_choice="auto") is None


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_arguments_of_a_forced_call_are_compact_and_begin_with_what_is_required(choice: Any):
    inner = {"type": "object", "properties": {"y": {}, "x": {}}, "required": ["x"]}
    tools = [tool("f", properties={"a": {}, "b": inner, "c": {}}, required=["b"])]
    form = chat(tools=tools, tool_choice=choice).sampling_params(SamplingParams()).structured_outputs
    assert form.disable_any_whitespace
    made = json.loads(form.json)
    made = made if choice == NAMED else made["$defs"]["0"]
    assert list(made["properties"]) == ["b", "a", "c"] and list(made["properties"]["b"]["properties"]) == ["x", "y"]


def test_a_tool_that_describes_no_arguments_has_none():
    assert schema(tools=[tool("f")], tool_choice=NAMED)["additionalProperties"] is False
    said = {"type": "object", "additionalProperties": True}
    assert schema(tools=[tool("f", **said)], tool_choice=NAMED) == said


def test_tools_that_no_grammar_has_room_for_are_refused_by_their_field():
    tools = [tool(f"f{i}", properties={f"p{j}": {"enum": ["x" * 60]} for j in range(20)}) for i in range(60)]
    with pytest.raises(ApiError, match=r"^tools: has \d+ bytes: at most 65536") as caught:
        schema(tools=tools, tool_choice="required")
    assert caught.value.param == "tools"
    assert schema(tools=tools) is None
    with pytest.raises(ApiError, match="forced calls are not supported with use_beam_search"):
        schema(tools=[tool()], tool_choice=NAMED, use_beam_search=True)


def test_required_makes_the_answer_a_list_of_calls_and_local_refs_still_resolve():
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}, "all": {"items": {"$ref": "#"}}}}
    tools = [tool("g"), tool("f", properties={"n": {"$ref": "#/$defs/n"}}, **{"$defs": {"n": node}})]
    made = schema(tools=tools, tool_choice="required")
    assert (made["type"], made["minItems"], "maxItems" in made) == ("array", 1, False)
    names = [call["properties"]["name"]["const"] for call in made["items"]["anyOf"]]
    arguments = [call["properties"]["arguments"]["$ref"] for call in made["items"]["anyOf"]]
    assert (names, arguments) == (["g", "f"], ["#/$defs/0", "#/$defs/1"])
    moved = made["$defs"]["1"]
    assert moved["properties"]["n"]["$ref"] == "#/$defs/1/$defs/n"
    assert moved["$defs"]["n"]["properties"]["next"]["$ref"] == "#/$defs/1/$defs/n"
    assert moved["$defs"]["n"]["properties"]["all"]["items"]["$ref"] == "#/$defs/1"
    assert schema(tools=tools, tool_choice="required", parallel_tool_calls=False)["maxItems"] == 1
