"""Forced tool calls and thinking budgets with a real, tiny model.

The model is far too small to call tools by itself.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator

from tests.counts import count
from tests.deploy.api.openai.call_schemas import SCHEMAS
from tests.deploy.running import RunningServer

NODE = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "next": {"$ref": "#/$defs/node"}},
    "required": ["n"],
    "additionalProperties": False,
}
COLOURS = ["red", "green", "blue"]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "paint",
            "parameters": {
                "type": "object",
                "properties": {"colour": {"enum": COLOURS}, "coats": {"type": "integer", "minimum": 1, "maximum": 3}},
                "required": ["colour", "coats"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "chain", "parameters": NODE | {"$defs": {"node": NODE}}}},
    {"type": "function", "function": {"name": "stop"}},
]
ASKED: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What colour is the sky?"}],
    "max_tokens": 80,
    "seed": 4,
    "temperature": 1.0,
}
AT_ONCE = ASKED | {"reasoning_effort": "none"}  # without thoughts, which this server's parser expects first

NUM_CALLS = count(1, 24)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    template = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}\n{% endfor %}"
    flags = ["--port", "0", "--reasoning-parser", "deepseek_r1", "--max-num-seqs", "8", "--chat-template", template]
    with RunningServer(command=[sys.executable, "-m", "millrace.deploy", "serve", *flags]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as made:
        yield made


def check_call(name: str, arguments: str) -> None:
    given = json.loads(arguments)
    if name == "paint":
        assert given["colour"] in COLOURS and given["coats"] in (1, 2, 3) and len(given) == 2
    elif name == "chain":
        while given is not None:
            assert given["n"] in range(10) and set(given) <= {"n", "next"}
            given = given.get("next")
    else:
        assert (name, given) == ("stop", {})


@pytest.mark.parametrize("name", ["paint", "chain", "stop"])
def test_a_named_tool_is_called_with_arguments_of_its_schema(client: openai.OpenAI, name: str):
    choice = {"type": "function", "function": {"name": name}}
    answer = client.chat.completions.create(tools=TOOLS, tool_choice=choice, n=3, **AT_ONCE)
    for each in answer.choices:
        assert each.message.content is None and len(each.message.tool_calls) == 1
        if each.finish_reason == "tool_calls":
            check_call(name, each.message.tool_calls[0].function.arguments)
    assert any(each.finish_reason == "tool_calls" for each in answer.choices)


def test_required_calls_something_and_a_stream_of_it_adds_up_to_the_whole(client: openai.OpenAI):
    asked = AT_ONCE | {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    names = set()
    for seed in range(2):
        whole = client.chat.completions.create(**asked | {"seed": seed}).choices[0]
        with client.chat.completions.stream(**asked | {"seed": seed}) as stream:
            final = stream.get_final_completion().choices[0] if whole.finish_reason == "tool_calls" else None
        (call,) = whole.message.tool_calls
        names.add(call.function.name)
        if final is not None:
            check_call(call.function.name, call.function.arguments)
            assert [made.function.arguments for made in final.message.tool_calls] == [call.function.arguments]
    assert names <= {"paint", "chain", "stop"}


CALLS = [(name, ("required", "named")[place % 2]) for place, name in enumerate(SCHEMAS)]  # by turns
CALLS += [(name, "named" if choice == "required" else "required") for name, choice in CALLS]


@pytest.mark.parametrize(("name", "choice"), CALLS[: count(len(SCHEMAS), full=len(CALLS))])
def test_calls_end_by_themselves_and_fit_though_the_model_knows_nothing(
    server: RunningServer, client: openai.OpenAI, name: str, choice: str
):
    tool_choice: Any = "required" if choice == "required" else {"type": "function", "function": {"name": name}}
    tools: list[Any] = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}}]
    asked = AT_ONCE | {"tools": tools, "tool_choice": tool_choice, "parallel_tool_calls": False, "max_tokens": 256}
    whole = client.chat.completions.create(n=NUM_CALLS, **asked)
    with client.chat.completions.stream(n=NUM_CALLS, **asked) as stream:
        streamed = stream.get_final_completion()
    for one, other in zip(whole.choices, streamed.choices, strict=True):
        assert one.finish_reason == other.finish_reason == "tool_calls", one
        (call,), (again,) = one.message.tool_calls, other.message.tool_calls
        assert call.function == call.function.model_validate(again.function.model_dump(include={"name", "arguments"}))
        Draft202012Validator(SCHEMAS[name]).validate(json.loads(call.function.arguments))


def test_a_schema_that_no_grammar_can_hold_is_refused_and_names_the_tools(server: RunningServer):
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    answer = server.post("/v1/chat/completions", AT_ONCE | {"tools": tools, "tool_choice": "required"})
    assert (answer.status, answer.error["param"]) == (400, "tools")
    assert answer.error["message"].startswith("tools: ")
    assert server.post("/v1/chat/completions", AT_ONCE | {"tools": tools, "max_tokens": 2}).status == 200


@pytest.mark.parametrize("budget", [0, 5])
def test_thoughts_end_when_their_budget_does(server: RunningServer, budget: int):
    asked = ASKED | {"thinking_budget": budget, "ignore_eos": True, "max_tokens": 40, "n": 2}
    answer = server.post("/v1/chat/completions", asked).json
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * budget}
    for choice in answer["choices"]:
        assert choice["message"]["content"] and ("reasoning" in choice["message"]) == (budget > 0)
    unlimited = server.post("/v1/chat/completions", ASKED | {"ignore_eos": True, "max_tokens": 40}).json
    assert unlimited["choices"][0]["message"]["content"] is None
    assert unlimited["usage"]["completion_tokens_details"] == {"reasoning_tokens": 40}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_thoughts_come_first_and_then_the_form(server: RunningServer, is_streamed: bool):
    choice = {"type": "function", "function": {"name": "paint"}}
    schema = {"name": "x", "schema": SCHEMAS["enums"], "strict": True}
    forms: list[dict[str, Any]] = [
        {"tools": TOOLS, "tool_choice": choice},
        {"response_format": {"type": "json_schema", "json_schema": schema}},
        {"structured_outputs": {"regex": "[0-9]{3}-[a-z]{2}"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ]
    for form in forms:
        asked = ASKED | form | {"thinking_budget": 6, "stream": is_streamed}
        answer = server.post("/v1/chat/completions", asked)
        deltas = [event["choices"][0]["delta"] for event in answer.events()[:-1]] if is_streamed else []
        messages = deltas if is_streamed else [answer.json["choices"][0]["message"]]
        thoughts = "".join(message.get("reasoning") or "" for message in messages)
        content = "".join(message.get("content") or "" for message in messages)
        calls = [call["function"].get("arguments", "") for m in messages for call in m.get("tool_calls") or ()]
        assert thoughts and "</think>" not in thoughts
        if "tools" in form:
            check_call("paint", "".join(calls))
        elif "response_format" in form:
            Draft202012Validator(SCHEMAS["enums"]).validate(json.loads(content))
        else:
            assert re.fullmatch("[0-9]{3}-[a-z]{2}|yes|no", content)
