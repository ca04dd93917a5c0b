"""All spellings of an input item give the same messages, and every wrong field is named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from millrace.deploy.api.adapter.chat_adapter import read_adapted, renamed
from millrace.deploy.api.responses.bodies import ResponsesBody, name_of
from millrace.deploy.api.responses.input_items import messages_of, num_to_cut, read_items
from millrace.deploy.errors import ApiError, wrong_field

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
TOOL_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "sun"}
SAID = {"role": "assistant", "content": "hello"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def messages(value: Any) -> list[dict[str, Any]]:
    items = read_items(value, "0")
    return messages_of(items, [f"input[{i}]" for i in range(len(items))])[0]


@pytest.mark.parametrize(
    "value",
    [
        "hi",
        [USER],
        [USER | {"type": "message"}],
        [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        [{"type": "message", "role": "user", "id": "msg_1", "content": [{"type": "text", "text": "hi"}]}],
    ],
)
def test_a_text_is_a_message_of_the_user_however_it_is_spelled(value):
    assert messages(value) == [{"role": "user", "content": "hi"}]


def test_calls_belong_to_the_turn_in_which_they_were_made():
    other = CALL | {"call_id": "d"}
    assert messages([USER, SAID, CALL, other, OUTPUT]) == [
        USER,
        SAID | {"tool_calls": [TOOL_CALL, TOOL_CALL | {"id": "d"}]},
        {"role": "tool", "tool_call_id": "c", "content": "sun"},
    ]
    assert messages([USER, CALL])[1] == {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]}


def test_reasoning_goes_with_what_was_said_or_called_after_it():
    assert messages([USER, THOUGHT, SAID])[1] == SAID | {"reasoning_content": "hm"}
    assert messages([USER, SAID, THOUGHT, CALL]) == [
        USER,
        SAID | {"reasoning_content": "hm", "tool_calls": [TOOL_CALL]},
    ]
    assert messages([USER, THOUGHT, SAID, THOUGHT, CALL])[1]["reasoning_content"] == "hm\nhm"


def test_reasoning_that_was_cut_off_is_a_turn_of_its_own():
    cut = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert messages([USER, THOUGHT]) == [USER, cut]
    assert messages([USER, THOUGHT, USER]) == [USER, cut, USER]
    assert messages([USER, THOUGHT, THOUGHT, OUTPUT])[1] == cut | {"reasoning_content": "hm\nhm"}


def test_an_answer_that_is_sent_back_is_what_was_said():
    part = {"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}
    item = {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "content": [part]}
    assert messages([USER, item]) == [USER, SAID]


def test_several_parts_stay_several():
    parts = [{"type": "input_text", "text": text} for text in "ab"]
    assert messages([{"role": "user", "content": parts}])[0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
    ]


@pytest.mark.parametrize(
    ("value", "param", "code"),
    [
        (5, "input", "invalid_type"),
        (None, "input", "invalid_type"),
        ("", "input", "empty_prompt"),
        ([], "input", "empty_prompt"),
        (["hi"], "input[0]", "invalid_type"),
        ([USER, {"role": "tool", "content": "x"}], "input[1].role", "invalid_value"),
        ([{"role": ["user"], "content": "x"}], "input[0].role", "invalid_value"),
        ([{"role": "user"}], "input[0].content", "invalid_type"),
        ([{"role": "user", "content": ["x"]}], "input[0].content[0]", "invalid_type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text", "invalid_type"),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "http://169.254.169.254/"}]}],
            "input[0].content[0].type",
            "unsupported_content_type",
        ),
        ([{"type": "item_reference", "id": "x"}], "input[0].type", "unsupported_parameter"),
        ([{"type": {}}], "input[0].type", "unsupported_parameter"),
        ([{"type": "function_call", "call_id": "c"}], "input[0].name", "invalid_type"),
        ([{"type": "function_call_output", "output": "x"}], "input[0].call_id", "invalid_type"),
        ([{"type": "function_call_output", "call_id": "c"}], "input[0].output", "invalid_type"),
        ([{"type": "reasoning", "summary": 5}], "input[0].summary", "invalid_type"),
    ],
)
def test_the_place_that_is_wrong_is_named(value, param, code):
    with pytest.raises(ApiError) as refused:
        read_items(value, "0")
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, code)
    assert refused.value.message.startswith(param)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "summary", "call_id", "name", "arguments", "output"]),
            inner | st.sampled_from(["message", "user", "assistant", "input_text", "function_call", "reasoning"]),
            max_size=5,
        )
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(value=JSON)
def test_any_json_is_read_or_refused_and_what_is_read_has_openais_shape(value):
    try:
        items = read_items(value, "0")
    except ApiError as refused:
        assert refused.status == 400 and refused.param.startswith("input")
        return
    TypeAdapter(list[ResponseItem]).validate_python(items)
    assert len({item["id"] for item in items}) == len(items)
    messages_of(items, [""] * len(items))


def test_as_little_as_possible_is_cut_and_what_is_left_begins_with_the_user():
    turns = [{"role": role} for role in ("user", "assistant", "user", "assistant", "tool", "user")]
    asked: list[int] = []

    def fits(num_cut: int, most: int) -> bool:
        asked.append(num_cut)
        return len(turns) - num_cut <= most

    expected = {6: 0, 5: 2, 4: 2, 3: 5, 1: 5, 0: 5}
    assert {most: num_to_cut(turns, lambda n, most=most: fits(n, most)) for most in expected} == expected
    assert set(asked) <= {0, 2, 5}


def test_errors_of_chat_are_told_in_the_names_of_this_api():
    name = name_of(["input[0]", "input[2]"], num_before=1)
    told = {
        "messages[0].content": "instructions.content",
        "messages[1].content": "input[0].content",
        "messages[2]": "input[2]",
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format.json_schema.schema": "text.format.schema",
        "tools[3].function.parameters": "tools[3].parameters",
        "temperature": "temperature",
    }
    assert {param: name(param) for param in told} == told
    error = wrong_field("max_tokens", "not this", "0").named(name)
    assert (error.message, error.param) == ("max_output_tokens = 0: not this", "max_output_tokens")
    assert renamed("a.b[0]", {"a": "x", "a.b": "y", "b": "z"}) == "y[0]"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_output_tokens", value) for value in (0, -1, "5", True)],
        *[("top_logprobs", value) for value in (-1, 21, "1")],
        *[("include", value) for value in ("x", ["x"], [5])],
        *[("text", value) for value in (5, {"format": {"type": "xml"}}, {"format": {"type": "json_schema"}})],
        *[("tools", value) for value in (5, [5])],
        *[("reasoning", value) for value in ({"effort": "huge"}, {"summary": "long"})],
        *[("truncation", value) for value in ("some", True)],
        *[
            ("metadata", value)
            for value in ({"k" * 65: ""}, {"k": "v" * 513}, {"k": 1}, {str(i): "" for i in range(17)})
        ],
        *[("user", value) for value in (5, "x" * 513)],
        *[("previous_response_id", value) for value in (5, "x" * 129)],
        *[(name, 1) for name in ("store", "background", "stream", "parallel_tool_calls")],
        *[(name, {"id": "x"}) for name in ("prompt", "conversation", "moderation")],
    ],
)
def test_a_wrong_value_names_its_field(field, value):
    with pytest.raises(ApiError) as refused:
        read_adapted(ResponsesBody, {"input": "hi", field: value}, False)
    assert (refused.value.status, refused.value.param.partition(".")[0].partition("[")[0]) == (400, field)


def test_fields_have_their_counterparts_in_chat():
    tool = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
    asked = {
        "input": "hi",
        "instructions": "be brief",
        "max_output_tokens": 5,
        "top_p": 0.5,
        "top_logprobs": 2,
        "tools": [{"type": "function", **tool}],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "max"},
        "text": {"format": {"type": "json_schema", **schema}},
        "user": "u",
        "seed": 3,
        "stop": ["x"],
    }
    body, passed, _ = read_adapted(ResponsesBody, asked, True)
    chat = body.chat([USER]) | passed
    assert {name: value for name, value in chat.items() if value is not None} == {
        "messages": [{"role": "system", "content": "be brief"}, USER],
        "max_completion_tokens": 5,
        "top_p": 0.5,
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [{"type": "function", "function": tool}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "xhigh",
        "response_format": {"type": "json_schema", "json_schema": schema},
        "user": "u",
        "seed": 3,
        "stop": ["x"],
    }


def test_a_background_response_that_is_not_stored_is_refused():
    with pytest.raises(ApiError, match="store") as refused:
        read_adapted(ResponsesBody, {"input": "hi", "background": True, "store": False}, False)
    assert refused.value.param == "background"
