"""`/v1/messages` over bare sockets: its streams, its limits, and errors in Anthropic's shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.deploy.running import Answer, RunningServer, post_bytes

PATH = "/v1/messages"
HELLO = [{"role": "user", "content": "Tell me a story"}]
ASK = {"messages": HELLO, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream; each bears its type as its name."""
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    frames = [frame.split("\n") for frame in answer.body.decode().split("\n\n")[:-1]]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name for name, _ in frames] == [f"event: {event['type']}" for event in events]
    return events


def text_of(message: dict[str, Any]) -> str:
    return "".join(block["text"] for block in message["content"])


def test_a_stream_adds_up_to_the_whole(server):
    whole = server.post(PATH, ASK).json
    events = events_of(server.post(PATH, ASK | {"stream": True}))
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(deltas) == text_of(whole)
    kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
    assert kinds == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[-2]["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == 12
    assert events[0]["message"]["id"].startswith("msg_") and events[0]["message"]["stop_reason"] is None


def test_it_says_what_chat_says(server):
    asked = {"temperature": 1.0, "seed": 5, "ignore_eos": True, "max_tokens": 12}
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    chat = server.post("/v1/chat/completions", asked | {"messages": messages}).json
    told = server.post(PATH, asked | {"system": "be brief", "messages": messages[1:]}).json
    assert text_of(told) == chat["choices"][0]["message"]["content"]
    usage = told["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]


def test_a_stop_sequence_ends_it_and_is_told(server):
    text = text_of(server.post(PATH, ASK).json)
    stop = text[4:6]
    told = server.post(PATH, ASK | {"stop_sequences": [stop]}).json
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", stop)
    assert text_of(told) == text[: text.index(stop)]


def test_the_beginning_of_an_answer_is_gone_on_with(server):
    messages = [*HELLO, {"role": "assistant", "content": "Once"}]
    asked = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}
    continued = {"add_generation_prompt": False, "continue_final_message": True}
    chat = server.post("/v1/chat/completions", asked | continued | {"messages": messages}).json
    assert text_of(server.post(PATH, asked | {"messages": messages}).json) == chat["choices"][0]["message"]["content"]


def test_tokens_are_counted_as_they_are_charged(server):
    body = {"messages": HELLO, "system": "be brief"}
    usage = server.post(PATH, ASK | body).json["usage"]
    counted = server.post(f"{PATH}/count_tokens", body).json
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize(
    ("fields", "status", "kind", "says"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 600}, 400, "invalid_request_error", "max_tokens = 600"),
        ({"temperature": 3}, 400, "invalid_request_error", "temperature = 3"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences = ''"),
        ({"messages": []}, 400, "invalid_request_error", "messages: is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "'image'"),
        ({"thinking": {"type": "enabled"}}, 400, "invalid_request_error", "thinking.budget_tokens"),
        ({"context_management": {"edits": [{"type": "x"}]}}, 400, "invalid_request_error", "context_management"),
        ({"tools": [{"name": "f", "input_schema": None}]}, 400, "invalid_request_error", "tools[0].input_schema"),
        ({"model": "other"}, 404, "not_found_error", "'other'"),
    ],
)
def test_errors_have_anthropics_shape_and_name_the_field(server, fields, status, kind, says):
    answer = server.post(PATH, ASK | fields)
    assert answer.status == status
    assert answer.json["type"] == "error" and answer.json["error"]["type"] == kind
    assert says in answer.json["error"]["message"]
    assert answer.json["request_id"] == answer.headers["x-request-id"]
    assert server.post(f"{PATH}/count_tokens", fields | {"messages": 5}).json["type"] == "error"


def test_errors_before_the_handler_have_that_shape_too(server):
    wrong_type = server.post(PATH, ASK, {"Content-Type": "text/plain"})
    answers = [wrong_type, server.get(PATH), server.post(PATH, b"{"), server.get(f"{PATH}/none")]
    assert [answer.status for answer in answers] == [415, 405, 400, 404]
    assert all(answer.json["type"] == "error" for answer in answers)
    assert "error" in server.get("/v1/models/none").json and "type" not in server.get("/v1/models/none").json


@pytest.mark.slow
def test_the_key_comes_as_x_api_key_and_a_full_house_says_so():
    options: dict[str, Any] = {"server": {"api_key": ["right"]}, "engine": {"max_admitted_requests": 1}}
    with RunningServer(**options, step_s=0.01, script={"eos_probability": 0.0}) as server:
        right = {"x-api-key": "right", "anthropic-version": "2023-06-01"}
        for headers, status in ((right, 200), ({"x-api-key": "wrong"}, 401), ({}, 401)):
            answer = server.post(f"{PATH}/count_tokens", {"messages": HELLO}, headers)
            assert answer.status == status
        assert answer.json["error"]["type"] == "authentication_error"
        with server.connect() as connection:
            connection.sendall(post_bytes(PATH, ASK | {"max_tokens": 400, "stream": True}, right))
            assert connection.recv(100)
            full = server.post(PATH, ASK, right)
        assert (full.status, full.json["error"]["type"]) == (429, "rate_limit_error")
        assert int(full.headers["retry-after"]) >= 1
        assert server.wait_until_idle() < 2.0


def test_a_client_that_leaves_ends_its_request(slow_server):
    for is_stream in (True, False):
        with slow_server.connect() as connection:
            connection.sendall(post_bytes(PATH, ASK | {"max_tokens": 400, "stream": is_stream}))
            while not slow_server.stats()["sequences"]:
                pass
        assert slow_server.wait_until_idle() < 2.0


def test_a_message_that_is_aborted_says_that_it_may_be_gone_on_with(slow_server):
    with slow_server.connect() as connection:
        asked = ASK | {"max_tokens": 400, "stream": True}
        connection.sendall(post_bytes(PATH, asked, {"X-Request-Id": "to-abort"}))
        data = connection.recv(65536)
        assert slow_server.get("/v1/requests/to-abort", method="DELETE").status == 200
        while more := connection.recv(65536):
            data += more
    assert b'"stop_reason":"pause_turn"' in data and data.rstrip().endswith(b"0")


RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "tool_reference", "tool_name": "f7"}]}


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"context_management": {"edits": []}}, None),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking"),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"tools": [{"name": f"f{i}", "input_schema": {}} for i in range(300)], "tool_choice": {"type": "none"}}, None),
        ({"messages": [*HELLO, {"role": "user", "content": [RESULT]}]}, None),
    ],
)
def test_what_asks_for_nothing_here_is_accepted_on_both_routes(server, fields, ignored):
    for path, body in ((PATH, ASK | {"max_tokens": 9}), (f"{PATH}/count_tokens", {"messages": HELLO})):
        answer = server.post(path, body | fields)
        assert (answer.status, answer.headers.get("x-ignored-fields")) == (200, ignored), answer.body
