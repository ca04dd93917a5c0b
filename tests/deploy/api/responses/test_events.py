"""The events of the Responses API for the parts of an answer: each event has its shape."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.deploy.api.adapter.answer_parts import AnswerEnd, Part, TextDelta, TokenUsage
from millrace.deploy.api.adapter.chat_adapter import read_adapted
from millrace.deploy.api.assistant_turn import ToolCallArguments, ToolCallBegun
from millrace.deploy.api.parsers.interface import Reasoning
from millrace.deploy.api.responses.bodies import ResponsesBody
from millrace.deploy.api.responses.events import ResponseEvents, new_response
from millrace.deploy.errors import ApiError
from millrace.stages.messages import TokenLogprobs
from millrace.stages.params import SamplingParams
from tests.deploy.openai_shapes import check_events, check_response, text_of

USAGE = TokenUsage(num_prompt=7, num_cached=4, num_completion=5, num_reasoning=2)
TEXTS = st.text(max_size=5)
ARGUMENTS = st.lists(st.builds(ToolCallArguments, st.just(0), TEXTS), max_size=3)
CALLS = st.tuples(st.builds(ToolCallBegun, st.just(0), st.text(min_size=1, max_size=3), TEXTS), ARGUMENTS)
RUNS = st.one_of(
    st.lists(st.builds(TextDelta, TEXTS), min_size=1, max_size=4),
    st.lists(st.builds(Reasoning, TEXTS), min_size=1, max_size=4),
    CALLS.map(lambda call: [call[0], *call[1]]),
)
ANSWERS = st.lists(RUNS, max_size=4).map(lambda runs: [part for run in runs for part in run])
ENDS = st.sampled_from(["stop", "length", "tool_calls", "abort"]).map(AnswerEnd)


def build(**fields: Any) -> ResponseEvents:
    body, _, _ = read_adapted(ResponsesBody, {"input": "hi"} | fields, False)
    return ResponseEvents(new_response("resp_0", "model", body, SamplingParams()))


def text_in(item: dict[str, Any]) -> str:
    return "".join(part["text"] for part in item.get("content", []))


def tell(parts: list[Part], end: AnswerEnd) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    built = build()
    events = built.begin()
    for part in [*parts, end]:
        events += built.add(part)
    return events + built.end(end, USAGE), built.response


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(parts=ANSWERS, end=ENDS)
def test_every_event_and_every_response_is_of_openais_shape(parts, end):
    events, response = tell(parts, end)
    check_events(events)
    check_response(response)
    assert events[-1]["response"] == response
    assert events[0]["response"]["output"] == [] and events[0]["response"]["status"] == "in_progress"


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(parts=ANSWERS, end=ENDS)
def test_deltas_joined_are_the_items_that_end_them(parts, end):
    events, response = tell(parts, end)
    deltas: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] = deltas.get(event["output_index"], "") + event["delta"]
    told = [
        item.get("arguments", "".join(part["text"] for part in item.get("content", []))) for item in response["output"]
    ]
    assert told == [deltas.get(i, "") for i in range(len(told))]
    assert text_of(response) == "".join(part.text for part in parts if isinstance(part, TextDelta))
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == response["output"]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(parts=ANSWERS, end=ENDS)
def test_items_are_opened_and_closed_one_after_the_other(parts, end):
    events, response = tell(parts, end)
    places = [event["output_index"] for event in events if "output_index" in event]
    assert [place for place, _ in groupby(places)] == list(range(len(response["output"])))
    for place in set(places):
        kinds = [event["type"] for event in events if event.get("output_index") == place]
        assert kinds[0] == "response.output_item.added" and kinds[-1] == "response.output_item.done"
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 1
    ids = [item["id"] for item in response["output"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("reason", "status", "last"),
    [
        ("stop", "completed", "response.completed"),
        ("tool_calls", "completed", "response.completed"),
        ("length", "incomplete", "response.incomplete"),
        ("abort", "cancelled", "response.incomplete"),
    ],
)
def test_the_end_of_the_answer_is_the_status_of_the_response(reason, status, last):
    events, response = tell([TextDelta("a")], AnswerEnd(reason))
    assert (response["status"], events[-1]["type"]) == (status, last)
    assert (response["completed_at"] is not None) == (status == "completed")
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if reason == "length" else None)
    assert response["output"][0]["status"] == ("completed" if status == "completed" else "incomplete")


def test_an_answer_of_no_words_is_an_empty_message():
    _, response = tell([], AnswerEnd("stop"))
    assert [item["type"] for item in response["output"]] == ["message"] and text_of(response) == ""


def test_a_failure_ends_what_was_under_way_and_says_why():
    built = build()
    events = built.begin() + built.add(TextDelta("a")) + built.fail(ApiError("rate_limit_exceeded", "no room"))
    check_events(events)
    assert built.response["error"] == {"code": "rate_limit_exceeded", "message": "no room"}
    assert built.response["output"][0]["status"] == "incomplete"


def test_logprobs_come_with_their_text_and_again_with_the_whole():
    token = TokenLogprobs(1, "a", b"a", -0.5, 1, ((1, "a", b"a", -0.5), (2, "b", b"b", float("-inf"))))
    events, response = tell([TextDelta("a", (token,)), TextDelta("a", (token,))], AnswerEnd("stop"))
    check_events(events)
    entry = {"token": "a", "logprob": -0.5, "bytes": [97]}
    expected = entry | {"top_logprobs": [entry, {"token": "b", "logprob": -9999.0, "bytes": [98]}]}
    assert [event["logprobs"] for event in events if event["type"].endswith(".delta")] == [[expected], [expected]]
    assert response["output"][0]["content"][0]["logprobs"] == [expected, expected]


def test_what_was_asked_for_is_told_again():
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    fields = {
        "instructions": "be brief",
        "metadata": {"a": "b"},
        "user": "u",
        "max_output_tokens": 5,
        "truncation": "auto",
        "top_logprobs": 3,
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low"},
        "text": {"format": schema},
        "tools": tools,
        "tool_choice": {"type": "function", "name": "f"},
        "store": False,
    }
    response = build(**fields).response
    check_response(response)
    told = {name: response[name] for name in fields}
    told["tools"] = [{key: value for key, value in tool.items() if value is not None} for tool in told["tools"]]
    assert told == fields | {"reasoning": {"effort": "low", "summary": None}}


def test_events_that_were_told_do_not_change_afterwards():
    built = build()
    first = built.begin()
    built.add(TextDelta("a"))
    built.end(AnswerEnd("stop"), USAGE)
    assert first[0]["response"]["output"] == [] and first[0]["response"]["status"] == "in_progress"


def test_usage_has_openais_names():
    _, response = tell([TextDelta("a")], AnswerEnd("stop"))
    assert response["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 12,
    }
