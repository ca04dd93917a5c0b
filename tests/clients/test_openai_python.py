"""The openai package with what it adds of its own: helpers that parse, accumulate, run tools and retry.

Its plain calls are in tests/deploy: api/openai/ (test_openai.py, test_tool_calls.py, test_embeddings.py),
api/responses/test_service.py and websocket/test_responses_socket.py. Here the bundled model answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.clients.conftest import KEY
from tests.deploy.running import RunningServer

pytestmark = [pytest.mark.clients, pytest.mark.slow]

MESSAGES: list[Any] = [{"role": "user", "content": "What colour is the sky?"}]
ASKED: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "seed": 4, "temperature": 1.0}


class Coat(BaseModel):
    colour: Literal["red", "green", "blue"]
    layers: int = Field(ge=1, le=3)


class Painting(BaseModel):
    model_config = ConfigDict(title="painting")

    is_dry: bool
    coats: list[Coat] = Field(min_length=1, max_length=2)
    remark: str | None = Field(max_length=8)


PAINT = openai.pydantic_function_tool(Coat, name="paint")


@pytest.fixture(scope="module")
def client(demo: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo.url + "/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_the_parse_helper_makes_an_object_of_a_chat(client: openai.OpenAI):
    choice = client.chat.completions.parse(response_format=Painting, max_tokens=200, **ASKED).choices[0]
    assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Painting)
    assert choice.message.parsed == Painting.model_validate_json(choice.message.content)
    with client.chat.completions.stream(response_format=Painting, max_tokens=200, **ASKED) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0].message
    assert "".join(pieces) == final.content == choice.message.content and final.parsed == choice.message.parsed


def test_the_parse_helper_says_that_an_answer_was_cut(client: openai.OpenAI):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(response_format=Painting, max_tokens=3, **ASKED)


def test_the_parse_helper_makes_an_object_of_a_response(client: openai.OpenAI):
    asked: dict[str, Any] = {"model": "demo", "input": MESSAGES, "text_format": Painting, "max_output_tokens": 200}
    response = client.responses.parse(**asked, temperature=0)
    assert response.status == "completed"
    assert response.output_parsed == Painting.model_validate_json(response.output_text)
    with client.responses.stream(**asked, temperature=0) as stream:
        final = stream.get_final_response()
    assert final.output_parsed == response.output_parsed


def test_a_call_in_a_chat_goes_there_and_its_result_comes_back(client: openai.OpenAI):
    """The loop of an agent: it sends the client's own message back, whose content is null, and then the result."""
    turns = [{"role": "system", "content": "You paint."}, *MESSAGES]
    asked = ASKED | {"messages": turns, "max_tokens": 200}
    choice = client.chat.completions.parse(tools=[PAINT], tool_choice="required", **asked).choices[0]
    (call, *_) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and isinstance(call.function.parsed_arguments, Coat)
    turns.append(choice.message)  # with what the helper has parsed in it
    turns += [{"role": "tool", "tool_call_id": made.id, "content": "dry"} for made in choice.message.tool_calls]
    final = client.chat.completions.create(**asked, tools=[PAINT], tool_choice="none").choices[0]
    assert final.message.content and final.message.tool_calls is None


def test_a_call_in_a_response_goes_there_and_its_result_comes_back(client: openai.OpenAI):
    tool = {"type": "function", "strict": True} | {k: v for k, v in PAINT["function"].items() if k != "strict"}
    asked: dict[str, Any] = {"model": "demo", "max_output_tokens": 200, "tools": [tool], "temperature": 0}
    first = client.responses.create(input=MESSAGES, tool_choice="required", parallel_tool_calls=False, **asked)
    (call,) = first.output
    assert call.type == "function_call" and Coat.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "dry"}
    chained = client.responses.create(input=[result], previous_response_id=first.id, tool_choice="none", **asked)
    spelled = client.responses.create(input=[*MESSAGES, call, result], tool_choice="none", **asked)
    assert chained.output_text == spelled.output_text != ""


def test_logprobs_of_a_stream_are_those_of_the_whole_answer(client: openai.OpenAI):
    asked = ASKED | {"max_tokens": 4, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asked).choices[0]
    streamed = [
        entry
        for chunk in client.chat.completions.create(stream=True, **asked)
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.logprobs.content]
    assert b"".join(bytes(entry.bytes) for entry in streamed).decode() == whole.message.content
    for one, other in zip(streamed, whole.logprobs.content, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3) and len(one.top_logprobs) == 3


def test_embeddings_by_the_asynchronous_client_are_the_same_alone_and_in_a_list(demo: RunningServer):
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=demo.url + "/v1", api_key=KEY, max_retries=0) as client:
            asked = (["the sky", "a dog"], "the sky", "a dog")
            return await asyncio.gather(*(client.embeddings.create(model="demo", input=each) for each in asked))

    both, *alone = ([item.embedding for item in made.data] for made in asyncio.run(ask()))
    assert np.allclose(both, [vector for (vector,) in alone], atol=1e-2)
    assert np.allclose(np.linalg.norm(both, axis=1), 1, atol=1e-3) and abs(np.dot(*both)) < 0.999


def test_the_clients_own_timeout_and_raw_answers_work(client: openai.OpenAI):
    raw = client.chat.completions.with_raw_response.create(max_tokens=2, **ASKED)
    assert raw.parse()._request_id == raw.headers["x-request-id"] != ""
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).completions.create(
            model="demo", prompt="a", max_tokens=2000, extra_body={"ignore_eos": True}
        )
