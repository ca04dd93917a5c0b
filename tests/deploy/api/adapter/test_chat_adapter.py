"""Calls and reasoning in the Responses and Messages APIs, read by the official clients.

The server is the real one on a socket of this process, in front of an engine whose answer is given.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import openai
import pytest
from pydantic import BaseModel

from millrace.deploy.config import ServerConfig
from millrace.deploy.server.server import Server
from millrace.stages.testing.scripted.engine import scripted_engine
from tests.deploy.openai_shapes import check_events, check_response

pytestmark = pytest.mark.slow  # the first test imports two large packages

T = TypeVar("T")

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "name": "weather", "description": "of a city", "parameters": WEATHER, "strict": False}]
CALLS = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
TWO = CALLS + "\n" + CALLS.replace("Köln", "Bonn")
THOUGHTS = "<think>\nIt is about weather.\n</think>\n\n"
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


@asynccontextmanager
async def serving(answer: Any) -> AsyncIterator[str]:
    config = ServerConfig(port=0, **PARSERS)
    async with (
        Server(config) as server,
        scripted_engine(answer=answer, max_model_len=2048, num_gpu_blocks=512) as engine,
    ):
        server.attach(engine)
        yield server.url


def ask(answer: Any, asking: Callable[[str], Awaitable[T]]) -> T:
    """Runs `asking` against a server that answers everything with `answer`."""

    async def run() -> T:
        async with serving(answer) as url:
            return await asking(url)

    return asyncio.run(run())


def with_openai(asking: Callable[[openai.AsyncOpenAI], Awaitable[T]]) -> Callable[[str], Awaitable[T]]:
    async def run(url: str) -> T:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as client:
            return await asking(client)

    return run


async def post(url: str, path: str, body: Any) -> Any:
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as response:
        return await response.json()


ASKED = {"model": "scripted", "input": "Weather?", "tools": TOOLS, "max_output_tokens": 400}


def test_calls_and_thoughts_are_items_of_a_response_whole_and_streamed():
    async def both(client: openai.AsyncOpenAI) -> tuple[Any, list[Any]]:
        whole = await client.responses.create(**ASKED)
        async with client.responses.stream(**ASKED) as stream:
            return whole, [event async for event in stream]

    whole, events = ask(THOUGHTS + "Let me see. " + TWO, with_openai(both))
    for response in (whole, events[-1].response):
        check_response(response.model_dump(mode="json", by_alias=True, exclude_unset=True))
        thought, said, *calls = response.output
        assert thought.type == "reasoning" and thought.content[0].text.strip() == "It is about weather."
        assert said.type == "message" and said.content[0].text.strip() == "Let me see."
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [
            ("weather", {"city": "Köln"}),
            ("weather", {"city": "Bonn"}),
        ]
        assert response.status == "completed" and len({call.call_id for call in calls}) == 2
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == "".join(call.arguments for call in calls)


def test_half_a_call_is_an_incomplete_item_and_no_use_of_a_tool():
    half = CALLS + '<tool_call>{"name": "weather", "arguments": {"city": Bonn}}'
    response = ask(half, with_openai(lambda client: client.responses.create(**ASKED)))
    assert [item.status for item in response.output if item.type == "function_call"] == ["completed", "incomplete"]

    message = ask(half, lambda url: post(url, "/v1/messages", MESSAGES))
    assert message["stop_reason"] == "end_turn"


def test_the_events_of_a_call_have_openais_shapes():
    async def stream(url: str) -> list[dict[str, Any]]:
        async with aiohttp.ClientSession() as session:
            async with session.post(url + "/v1/responses", json=ASKED | {"stream": True}) as response:
                lines = (await response.text()).splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]

    events = ask(CALLS, stream)
    check_events(events)
    kinds = {event["type"].removeprefix("response.") for event in events}
    assert kinds >= {"function_call_arguments.delta", "function_call_arguments.done"}
    assert "output_text.delta" not in kinds


def test_a_result_goes_back_by_the_id_of_its_call_in_either_way_of_asking():
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return "It rains." if "rain" in prompt else CALLS

    async def converse(client: openai.AsyncOpenAI) -> list[str]:
        first = await client.responses.create(**ASKED)
        result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "rain"}
        stored = await client.responses.create(**ASKED | {"input": [result], "previous_response_id": first.id})
        sent = [{"role": "user", "content": "Weather?"}, *(item.model_dump() for item in first.output), result]
        spelled = await client.responses.create(**ASKED | {"input": sent})
        return [stored.output_text, spelled.output_text]

    assert ask(answer, with_openai(converse)) == ["It rains."] * 2
    assert prompts[-1] == prompts[-2] != prompts[0]


def test_one_call_is_all_if_they_may_not_be_parallel():
    async def create(client: openai.AsyncOpenAI) -> Any:
        return await client.responses.create(**ASKED, parallel_tool_calls=False)

    assert len(ask(TWO, with_openai(create)).output) == 1


def test_a_tool_that_is_wrong_is_named_in_this_apis_words():
    tools = [{"type": "function", "name": "two words"}]

    async def refused(url: str) -> list[Any]:
        responses = await post(url, "/v1/responses", ASKED | {"tools": tools})
        messages = await post(url, "/v1/messages", MESSAGES | {"tools": [{"name": "two words", "input_schema": {}}]})
        return [responses["error"]["param"], responses["error"]["message"], messages["error"]["message"]]

    param, *told = ask("", refused)
    assert param == "tools[0].name" and all(message.startswith("tools[0].name") for message in told)


# -- output formats


class City(BaseModel):
    """The requested answer."""

    name: str
    people: int


def test_the_clients_parse_helper_gets_what_it_asked_for():
    async def parse(client: openai.AsyncOpenAI) -> tuple[Any, Any]:
        asked = {"model": "scripted", "input": "Which?", "text_format": City, "max_output_tokens": 100}
        whole = await client.responses.parse(**asked)
        async with client.responses.stream(**asked) as stream:
            return whole, await stream.get_final_response()

    for response in ask('{"name":"Köln","people":1000000}', with_openai(parse)):
        assert response.output_parsed == City(name="Köln", people=1_000_000)
        assert response.text.format.schema_["required"] == ["name", "people"]


def test_a_form_that_is_wrong_is_named_in_the_words_of_each_api():
    async def refused(url: str) -> list[str]:
        responses = {"input": "x", "text": {"format": {"type": "json_schema", "name": "two words", "schema": {}}}}
        messages = {"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}
        told = [
            await post(url, "/v1/responses", responses),
            await post(url, "/v1/messages", MESSAGES | messages | {"tools": []}),
        ]
        return [answer["error"]["message"].partition(":")[0].partition(" ")[0] for answer in told]

    assert ask("{}", refused) == ["text.format.name", "output_config.format"]


# -- messages


MESSAGES = {
    "model": "scripted",
    "max_tokens": 400,
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": [{"name": "weather", "description": "of a city", "input_schema": WEATHER}],
}


def with_anthropic(asking: Callable[[Any], Awaitable[T]]) -> Callable[[str], Awaitable[T]]:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed (extra: clients)")

    async def run(url: str) -> T:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="unused", max_retries=0) as client:
            return await asking(client)

    return run


def test_anthropics_client_reads_thoughts_words_and_calls_whole_and_streamed():
    async def both(client: Any) -> tuple[Any, Any]:
        whole = await client.messages.create(**MESSAGES)
        async with client.messages.stream(**MESSAGES) as stream:
            return whole, await stream.get_final_message()

    for message in ask(THOUGHTS + "Let me see. " + TWO, with_anthropic(both)):
        thought, said, *calls = message.content
        assert thought.type == "thinking" and thought.thinking.strip() == "It is about weather."
        assert said.type == "text" and said.text.strip() == "Let me see."
        assert [(call.type, call.name, call.input["city"]) for call in calls] == [
            ("tool_use", "weather", "Köln"),
            ("tool_use", "weather", "Bonn"),
        ]
        assert message.stop_reason == "tool_use" and message.usage.output_tokens > 100


def test_anthropics_client_sends_results_back():
    async def converse(client: Any) -> str:
        first = await client.messages.create(**MESSAGES)
        result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "rain"}
        turns = [
            *MESSAGES["messages"],
            {"role": "assistant", "content": [block.to_dict() for block in first.content]},
            {"role": "user", "content": [result]},
        ]
        second = await client.messages.create(**MESSAGES | {"messages": turns})
        return second.content[0].text

    answer = ask(lambda prompt: "It rains." if "rain" in prompt else CALLS, with_anthropic(converse))
    assert answer == "It rains."


def test_anthropics_client_counts_tokens_and_knows_its_errors():
    async def count(client: Any) -> tuple[int, int, str]:
        import anthropic

        counted = await client.messages.count_tokens(model="scripted", messages=MESSAGES["messages"])
        told = await client.messages.create(model="scripted", max_tokens=5, messages=MESSAGES["messages"])
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(**MESSAGES | {"max_tokens": 10**4})
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**MESSAGES | {"model": "other"})
        return counted.input_tokens, told.usage.input_tokens, refused.value.body["error"]["type"]

    counted, told, kind = ask("Hello", with_anthropic(count))
    assert counted == told > 0 and kind == "invalid_request_error"
