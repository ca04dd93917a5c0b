"""Events of the Messages API for the parts of an answer, read by Anthropic's package."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from millrace.deploy.api.adapter.answer_parts import AnswerEnd, Part, TextDelta, TokenUsage
from millrace.deploy.api.adapter.chat_adapter import read_adapted
from millrace.deploy.api.assistant_turn import ToolCallArguments, ToolCallBegun
from millrace.deploy.api.messages.bodies import CountTokensBody, MessagesBody, name_of
from millrace.deploy.api.messages.events import PING, MessageEvents, error_body
from millrace.deploy.api.parsers.interface import Reasoning
from millrace.deploy.errors import ApiError

USAGE = TokenUsage(num_prompt=7, num_cached=4, num_completion=5)
TEXTS = st.text(max_size=5)
RUNS = st.one_of(
    st.lists(st.builds(TextDelta, TEXTS), min_size=1, max_size=4),
    st.lists(st.builds(Reasoning, TEXTS), min_size=1, max_size=4),
    st.builds(ToolCallBegun, st.just(0), TEXTS, TEXTS).map(
        lambda call: [call, ToolCallArguments(0, '{"a"'), ToolCallArguments(0, ": 1}")]
    ),
)
ANSWERS = st.lists(RUNS, max_size=4).map(lambda runs: [part for run in runs for part in run])
ENDS = st.sampled_from(
    [AnswerEnd("stop"), AnswerEnd("stop", "x"), AnswerEnd("length"), AnswerEnd("tool_calls"), AnswerEnd("abort")]
)


def tell(parts: list[Part], end: AnswerEnd) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    built = MessageEvents("msg_0", "model", ("x",))
    events = built.begin(USAGE)
    for part in [*parts, end]:
        events += built.add(part)
    events += built.end(end, USAGE)
    return events, json.loads(orjson.dumps(built.message))


@cache
def anthropics() -> Any:
    """The package's functions that accumulate events, read an event and read a message."""
    types = pytest.importorskip("anthropic.types", reason="the anthropic package is not installed (extra: clients)")
    from anthropic.lib.streaming._messages import accumulate_event

    read_event = TypeAdapter(types.RawMessageStreamEvent).validate_python
    return accumulate_event, read_event, types.Message.model_validate


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(parts=ANSWERS, end=ENDS)
def test_anthropics_package_reads_the_message_out_of_the_events(parts, end):
    accumulate, read_event, read_message = anthropics()
    events, message = tell(parts, end)
    read, buffers = None, {}
    for event in events:
        if event != PING:
            read = accumulate(event=read_event(event), current_snapshot=read, json_bufs=buffers)
    assert read.to_dict(exclude_none=True) == read_message(message).to_dict(exclude_none=True)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(parts=ANSWERS, end=ENDS)
def test_blocks_are_opened_and_closed_one_after_the_other(parts, end):
    events, message = tell(parts, end)
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    told = [(event["type"], event["index"]) for event in events if "index" in event]
    for index in range(len(message["content"])):
        kinds = [kind for kind, of in told if of == index]
        assert kinds[0] == "content_block_start" and kinds[-1] == "content_block_stop"
        assert set(kinds[1:-1]) <= {"content_block_delta"}
    assert [index for _, index in told] == sorted(index for _, index in told)


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (AnswerEnd("stop"), "end_turn", None),
        (AnswerEnd("stop", 256), "end_turn", None),
        (AnswerEnd("stop", "x"), "stop_sequence", "x"),
        (AnswerEnd("length"), "max_tokens", None),
        (AnswerEnd("tool_calls"), "tool_use", None),
        (AnswerEnd("abort"), "pause_turn", None),
    ],
)
def test_the_end_of_the_answer_is_the_stop_reason_of_the_message(end, reason, sequence):
    events, message = tell([TextDelta("a")], end)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_cached_tokens_are_counted_apart():
    events, message = tell([TextDelta("a")], AnswerEnd("stop"))
    usage = {
        "input_tokens": 3,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "output_tokens": 5,
    }
    assert message["usage"] == events[-2]["usage"] == usage


def test_arguments_that_break_off_are_no_arguments():
    for text, read in (('{"a": 1}', {"a": 1}), ('{"a":', {}), ("", {}), ("[1]", {})):
        assert input_of(text) == read


def test_numbers_in_arguments_keep_all_their_digits():
    number = 10**30 + 1
    assert input_of(f'{{"a": {number}, "b": 0.10}}') == {"a": number, "b": 0.1}


def input_of(arguments: str) -> Any:
    """The input of a block of type tool_use, for a call with these arguments."""
    parts: list[Part] = [ToolCallBegun(0, "c", "f"), ToolCallArguments(0, arguments)]
    return tell(parts, AnswerEnd("tool_calls"))[1]["content"][0]["input"]


def test_errors_have_anthropics_types():
    types = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
    types |= {413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}
    for status, kind in types.items():
        body = error_body(ApiError("x", "what", status=status), "id")
        assert body == {"type": "error", "error": {"type": kind, "message": "what"}, "request_id": "id"}


# -- bodies


def chat(**fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5} | fields
    body, passed, _ = read_adapted(MessagesBody, asked, False)
    made, _ = body.chat()
    return {name: value for name, value in (made | passed).items() if value is not None}


USE = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}
CALL = {"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}


def test_blocks_become_messages_of_chat():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look"},
                USE,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "sun"}]},
                {"type": "tool_result", "tool_use_id": "u", "is_error": True},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    made = chat(messages=messages, system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    assert made["messages"] == [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look", "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "t", "content": "sun"},
        {"role": "tool", "tool_call_id": "u", "content": ""},
        {"role": "user", "content": "so?"},
    ]


def test_fields_have_their_counterparts_in_chat():
    tools = [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]
    made = chat(
        tools=tools,
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        stop_sequences=["x"],
        top_k=3,
        seed=7,
        metadata={"user_id": "u"},
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
    )
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert made["tools"] == [{"type": "function", "function": function}]
    assert made["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert (made["parallel_tool_calls"], made["stop"], made["top_k"], made["seed"]) == (False, ["x"], 3, 7)
    assert made["user"] == "u" and made["response_format"]["json_schema"]["schema"] == {"type": "object"}
    for choice, of_chat in (("auto", "auto"), ("any", "required"), ("none", "none")):
        assert chat(tools=tools, tool_choice={"type": choice})["tool_choice"] == of_chat


def test_a_last_word_of_the_assistant_is_the_beginning_of_the_answer():
    made = chat(messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I"}])
    assert (made["continue_final_message"], made["add_generation_prompt"]) == (True, False)


def said(*content: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(content)}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *[({"max_tokens": value}, "max_tokens") for value in (0, -1, "5", None)],
        *[({"messages": value}, "messages") for value in (5, [])],
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": said(5)}, "messages[0].content[0]"),
        ({"messages": said({"type": "image", "source": {}})}, "messages[0].content[0].type"),
        ({"messages": said({"type": []})}, "messages[0].content[0].type"),
        ({"messages": said(USE)}, "messages[0].content[0].type"),
        ({"messages": said(USE | {"input": "x"}, role="assistant")}, "messages[0].content[0].input"),
        ({"messages": said({"type": "tool_result"})}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": said({"type": "tool_result", "tool_use_id": "t", "content": 5})},
            "messages[0].content[0].content",
        ),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)
def test_the_field_that_is_wrong_is_named(fields, param):
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.message.startswith(param)


def test_errors_of_chat_are_told_in_the_names_of_this_api():
    name = name_of(["system", "messages[0]", "messages[0]"])
    told = {
        "messages[0].content": "system.content",
        "messages[2]": "messages[0]",
        "stop": "stop_sequences",
        "tools[1].function.parameters": "tools[1].input_schema",
        "tools[1].function.name": "tools[1].name",
        "response_format.json_schema.schema": "output_config.format.schema",
        "prompt": "messages",
        "max_tokens": "max_tokens",
    }
    assert {param: name(param) for param in told} == told


def test_tokens_are_counted_without_a_limit_on_the_answer():
    body, _, _ = read_adapted(CountTokensBody, {"messages": [{"role": "user", "content": "hi"}]}, True)
    assert "max_tokens" not in body.chat()[0]
