"""langchain-openai, unmodified but for where it looks: chat, tools, structured output, completions, embeddings."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from typing import Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from tests.clients.conftest import KEY
from tests.deploy.running import RunningServer

pytestmark = [
    pytest.mark.clients,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("langchain_openai") is None,
        reason="langchain_openai is missing: pip install -e '.[clients]'",
    ),
]

QUESTION = "What colour is the sky?"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 40}}\n</tool_call>'


class Coat(BaseModel):
    """What is on a wall."""

    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "green", "blue"]
    layers: int = Field(ge=1, le=3)


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


def chat_model(server: RunningServer, **options: Any) -> Any:
    from langchain_openai import ChatOpenAI

    known = {"model": "demo", "max_retries": 0, "temperature": 0, "max_tokens": 200}
    return ChatOpenAI(base_url=server.url + "/v1", api_key=SecretStr(KEY), **known | options)


def test_a_chat_answers_and_streams_the_same(demo: RunningServer):
    model = chat_model(demo, stream_usage=True)
    whole = model.invoke(QUESTION)
    chunks = list(model.stream(QUESTION))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert joined.content == whole.content != "" and len(chunks) > 2
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"] > 0
    assert whole.response_metadata["finish_reason"] == joined.response_metadata["finish_reason"] == "stop"

    async def several() -> list[Any]:
        return await model.abatch([QUESTION, "Tell me a story"])

    assert asyncio.run(several())[0].content == whole.content


def test_a_tool_that_the_model_calls_is_run_and_its_result_goes_back(parrot: RunningServer):
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    adder = tool(add)
    model = chat_model(parrot).bind_tools([adder])
    turns: list[Any] = [HumanMessage(f"Let me see. {CALL}{CALL}")]
    answer = model.invoke(turns)
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("add", {"a": 2, "b": 40})] * 2
    assert answer.content.strip() == "Let me see." and not answer.invalid_tool_calls
    turns += [answer, *(adder.invoke(call) for call in answer.tool_calls)]
    assert [turn.content for turn in turns[2:]] == ["42", "42"]
    final = model.invoke([*turns, HumanMessage("So?")])
    assert (final.content, final.tool_calls) == ("So?", [])


def test_a_streamed_call_is_put_together(parrot: RunningServer):
    chunks = list(chat_model(parrot).bind_tools([add]).stream(CALL))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert [(call["name"], call["args"]) for call in joined.tool_calls] == [("add", {"a": 2, "b": 40})]


@pytest.mark.parametrize("choice", ["required", "any", "add"])
def test_a_tool_that_must_be_called_is_called_and_then_no_more(demo: RunningServer, choice: str):
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    adder = tool(add)
    model = chat_model(demo)
    turns: list[Any] = [HumanMessage(QUESTION)]
    bound = model.bind_tools([adder], tool_choice=choice, parallel_tool_calls=False, strict=True)
    answer = bound.invoke(turns)
    (call,) = answer.tool_calls
    assert call["name"] == "add" and set(call["args"]) == {"a", "b"}
    result = adder.invoke(call)
    assert json.loads(result.content) == call["args"]["a"] + call["args"]["b"]
    final = model.invoke([*turns, answer, result])
    assert final.content and not final.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object_of_the_class(demo: RunningServer, method: str):
    model = chat_model(demo).with_structured_output(Coat, method=method, include_raw=True)
    answer = model.invoke(QUESTION)
    assert answer["parsing_error"] is None and isinstance(answer["parsed"], Coat)


def test_structured_output_may_be_a_plain_schema_and_streams(demo: RunningServer):
    schema = Coat.model_json_schema() | {"title": "coat"}
    model = chat_model(demo).with_structured_output(schema, method="json_schema", strict=True)
    whole = model.invoke(QUESTION)
    assert Coat.model_validate(whole)
    assert list(model.stream(QUESTION))[-1] == whole


def test_the_responses_api_calls_tools_too(demo: RunningServer):
    model = chat_model(demo, use_responses_api=True)
    assert model.invoke(QUESTION).text == chat_model(demo).invoke(QUESTION).text
    answer = model.bind_tools([Coat], tool_choice="Coat", strict=True).invoke(QUESTION)
    (call,) = answer.tool_calls
    assert call["name"] == "Coat" and Coat.model_validate(call["args"])


def test_completions_and_embeddings_come_through_their_classes(demo: RunningServer):
    from langchain_openai import OpenAI, OpenAIEmbeddings

    known: dict[str, Any] = {"model": "demo", "base_url": demo.url + "/v1", "api_key": SecretStr(KEY)}
    completed = OpenAI(**known, temperature=0, max_tokens=10, max_retries=0)
    assert "".join(completed.stream("Once upon a time")) == completed.invoke("Once upon a time") != ""
    # By default the class counts tokens with OpenAI's own vocabulary, which other models do not have.
    embeddings = OpenAIEmbeddings(**known, check_embedding_ctx_length=False, max_retries=0)
    both = embeddings.embed_documents(["the sky", "a dog"])
    assert np.allclose(both[0], embeddings.embed_query("the sky"), atol=1e-2) and len(both) == 2
