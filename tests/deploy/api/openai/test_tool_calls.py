"""Tool calls and reasoning over HTTP, whole and streamed, raw and by the official client."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.deploy.running import RunningServer

CHAT = "/v1/chat/completions"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🌧", "days": [1, 2]}}\n</tool_call>'
ARGUMENTS = '{"city": "Zürich 🌧", "days": [1, 2]}'
PYTHON = '<tool_call>{"name": "run", "arguments": {"code": "__import__(\'os\').system(\'touch x\')"}}</tool_call>'
THOUGHT = "<think>\nHm, é.\n</think>\n\n"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Of a city", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "run"}},
]


@pytest.fixture(scope="module")
def parrot() -> Iterator[RunningServer]:
    """A server that answers with the prompt it gets."""
    engine = {"max_model_len": 2048, "num_gpu_blocks": 512}
    with RunningServer(parrot=True, server={"reasoning_parser": "qwen3"}, engine=engine) as running:
        yield running
        running.wait_until_idle()


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "tools": TOOLS} | fields


def whole(server: RunningServer, text: str, **fields: Any) -> dict[str, Any]:
    answer = server.post(CHAT, body(text, **fields))
    assert answer.status == 200, answer.body
    return answer.json


def streamed(server: RunningServer, text: str, **fields: Any) -> list[dict[str, Any]]:
    *chunks, done = server.post(CHAT, body(text, stream=True, **fields)).events()
    assert done == "[DONE]"
    return chunks


def joined(chunks: list[dict[str, Any]], index: int = 0) -> tuple[dict[str, Any], str]:
    """The joined message of a choice's deltas, without call ids, and its finish reason."""
    message: dict[str, Any] = {"content": ""}
    reasons = []
    for choice in (chunk["choices"][0] for chunk in chunks if chunk["choices"]):
        if choice["index"] != index:
            continue
        delta = choice["delta"]
        for name in ("content", "reasoning", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for part in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in part:
                assert part["index"] == len(calls) and set(part) == {"index", "id", "type", "function"}
                assert part["type"] == "function" and part["function"]["arguments"] == ""
                calls.append({"name": part["function"]["name"], "arguments": ""})
            else:
                assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
                calls[part["index"]]["arguments"] += part["function"]["arguments"]
        if choice["finish_reason"] is not None:
            reasons.append(choice["finish_reason"])
    (reason,) = reasons
    return message, reason


def told(answer: dict[str, Any], index: int = 0) -> tuple[dict[str, Any], str]:
    """A whole answer in the same shape."""
    choice = answer["choices"][index]
    message = {name: value for name, value in choice["message"].items() if name != "role"}
    message["content"] = message["content"] or ""
    if "tool_calls" in message:
        assert len({call["id"] for call in message["tool_calls"]}) == len(message["tool_calls"])
        message["tool_calls"] = [call["function"] for call in message["tool_calls"]]
    return message, choice["finish_reason"]


def test_the_shapes_of_a_call_are_openais(parrot: RunningServer):
    choice = whole(parrot, CALL)["choices"][0]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": None} and choice["finish_reason"] == "tool_calls"
    assert call["id"].startswith("call_") and call["type"] == "function"
    assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}

    chunks = [chunk["choices"][0] for chunk in streamed(parrot, CALL)]
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
    (first,) = chunks[1]["delta"]["tool_calls"]
    assert first == {
        "index": 0,
        "id": first["id"],
        "type": "function",
        "function": {"name": "get_weather", "arguments": ""},
    }
    for chunk in chunks[2:-1]:
        assert list(chunk["delta"]) == ["tool_calls"] and chunk["finish_reason"] is None
        assert list(chunk["delta"]["tool_calls"][0]) == ["index", "function"]
    assert (chunks[-1]["finish_reason"], chunks[-1]["delta"].get("content")) == ("tool_calls", None)


TEXTS = {
    "words": "No calls, 1 < 2, <tool_",
    "a call": CALL,
    "words and two calls": f"Let me see. 🙂\n{CALL}\n{PYTHON}",
    "thoughts and words": THOUGHT + "Grüße!",
    "thoughts and a call": f"{THOUGHT}{CALL}\n",
    "thoughts only": "<think>\nfor ever",
    "a broken call": '<tool_call>{"name": "get_weather", "arguments": oops}</tool_call>',
    "a call that breaks off": '<tool_call>{"name": "get_weather", "arguments": {"city": oops}}</tool_call>',
}
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cut": {"max_tokens": 70},
    "two choices": {"n": 2, "seed": 1},
    "a stop string": {"stop": ["days", "x\n"]},
    "one call": {"parallel_tool_calls": False},
    "no tools": {"tool_choice": "none"},
    "hidden thoughts": {"include_reasoning": False},
    "log-probabilities": {"logprobs": True, "top_logprobs": 1},
}


@pytest.mark.parametrize(("name", "fields"), list(itertools.product(TEXTS, FIELDS)))
def test_deltas_add_up_to_the_whole_answer(parrot: RunningServer, name: str, fields: str):
    text, asked = TEXTS[name], FIELDS[fields]
    answer = whole(parrot, text, **asked)
    chunks = streamed(parrot, text, stream_options={"include_usage": True}, **asked)
    for index in range(asked.get("n", 1)):
        assert joined(chunks, index) == told(answer, index)
    for count in ("completion_tokens", "completion_tokens_details"):
        assert chunks[-1]["usage"][count] == answer["usage"][count]
    entries = [
        entry
        for chunk in chunks
        if chunk["choices"]
        for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", ())
    ]
    assert entries == (answer["choices"][0]["logprobs"] or {}).get("content", [])


def test_what_a_model_thinks_comes_by_both_names_and_is_counted(parrot: RunningServer):
    answer = whole(parrot, THOUGHT + "Hi")
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Hi",
        "reasoning": "Hm, é.",
        "reasoning_content": "Hm, é.",
    }
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("\nHm, é.\n".encode())}
    for call in (whole(parrot, THOUGHT + CALL), whole(parrot, "<think>only")):
        assert call["choices"][0]["message"]["content"] is None
    assert "reasoning" not in whole(parrot, "Hi")["choices"][0]["message"]


def test_code_in_a_call_stays_a_text(parrot: RunningServer):
    (call,) = told(whole(parrot, PYTHON))[0]["tool_calls"]
    assert json.loads(call["arguments"]) == {"code": "__import__('os').system('touch x')"}


def test_an_answer_cut_by_its_length_keeps_that_reason_and_the_partial_call(parrot: RunningServer):
    message, reason = told(whole(parrot, CALL, max_tokens=len('<tool_call>\n{"name": "get_weather", "arguments": {"c')))
    assert (reason, message["tool_calls"]) == ("length", [{"name": "get_weather", "arguments": '{"c'}])


@pytest.mark.parametrize(
    ("text", "fields", "arguments"),
    [
        (CALL, {"stop": ["days"]}, '{"city": "Zürich 🌧", "'),
        ('<tool_call>{"name": "run", "arguments": {"a": 1, b: 2}}</tool_call>', {}, '{"a": 1, '),
        (CALL + '<tool_call>{"name": "run", "arguments": {"a": ', {}, '{"a": '),
    ],
)
def test_an_answer_with_half_a_call_does_not_say_that_there_are_calls_to_make(
    parrot: RunningServer, text: str, fields: dict[str, Any], arguments: str
):
    message, reason = told(whole(parrot, text, **fields))
    assert reason == "stop" and message["tool_calls"][-1]["arguments"] == arguments
    assert joined(streamed(parrot, text, **fields)) == (message, reason)


# -- the official client


@pytest.fixture(scope="module")
def client(parrot: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=parrot.url + "/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_the_official_client_reads_calls_and_sends_their_results(client: openai.OpenAI):
    turns: list[Any] = [{"role": "user", "content": f"On it.\n{CALL}\n{PYTHON}"}]
    choice = client.chat.completions.create(model="scripted", messages=turns, tools=TOOLS).choices[0]
    calls = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content == "On it."
    assert [call.function.name for call in calls] == ["get_weather", "run"]
    assert json.loads(calls[0].function.arguments) == json.loads(ARGUMENTS)
    turns.append(choice.message)
    turns += [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
    turns.append({"role": "user", "content": "And now?"})
    final = client.chat.completions.create(model="scripted", messages=turns, tools=TOOLS).choices[0]
    assert (final.message.content, final.message.tool_calls, final.finish_reason) == ("And now?", None, "stop")


def test_the_official_clients_own_accumulator_puts_a_stream_of_calls_together(client: openai.OpenAI):
    asked = {
        "model": "scripted",
        "messages": [{"role": "user", "content": f"{THOUGHT}On it.\n{CALL}\n{CALL}"}],
        "tools": TOOLS,
    }
    expected = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert {"content.done", "tool_calls.function.arguments.done"} <= kinds
    assert final.finish_reason == expected.finish_reason == "tool_calls"
    assert final.message.content == expected.message.content == "On it."
    assert [call.function.arguments for call in final.message.tool_calls] == [ARGUMENTS] * 2
    assert final.message.reasoning == expected.message.reasoning == "Hm, é."


def test_the_official_clients_parse_helper_reads_arguments(client: openai.OpenAI):
    schema = SCHEMA | {"additionalProperties": False, "required": ["city", "days"]}
    function = {"name": "get_weather", "strict": True, "parameters": schema}
    asked = {"model": "scripted", "messages": [{"role": "user", "content": CALL}]}
    parsed = client.chat.completions.parse(tools=[{"type": "function", "function": function}], **asked)
    assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == json.loads(ARGUMENTS)
