"""litellm, unmodified but for where it looks: completion, streams, tools, structured output, embedding, errors."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from typing import Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.clients.conftest import KEY
from tests.deploy.running import RunningServer

pytestmark = [
    pytest.mark.clients,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("litellm") is None or importlib.util.find_spec("mcp") is None,
        reason="litellm or mcp, which it imports for tools, is missing: pip install -e '.[clients]'",
    ),
]

MESSAGES: list[Any] = [{"role": "user", "content": "What colour is the sky?"}]


class Coat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "green", "blue"]
    layers: int = Field(ge=1, le=3)


PAINT = {"type": "function", "function": {"name": "paint", "parameters": Coat.model_json_schema()}}


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package; it would fetch its list of prices from the network."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm as package

    return package


def asked(server: RunningServer, **fields: Any) -> dict[str, Any]:
    where = {"model": "openai/demo", "api_base": server.url + "/v1", "api_key": KEY}
    return where | {"messages": MESSAGES, "max_tokens": 200, "temperature": 0, "max_retries": 0} | fields


def test_a_completion_answers_and_streams_the_same(litellm: Any, demo: RunningServer):
    whole = litellm.completion(**asked(demo))
    chunks = list(litellm.completion(**asked(demo, stream=True, stream_options={"include_usage": True})))
    joined = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    text = whole.choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text != ""
    assert joined.choices[0].message.content == text and joined.choices[0].finish_reason == "stop"
    assert joined.usage.completion_tokens == whole.usage.completion_tokens > 0


def test_a_text_completion_answers_and_streams_the_same(litellm: Any, demo: RunningServer):
    fields = asked(demo, prompt="Once upon a time", max_tokens=10)
    del fields["messages"]
    fields["model"] = fields["model"].replace("openai/", "text-completion-openai/")
    whole = litellm.text_completion(**fields)
    streamed = litellm.text_completion(**fields, stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in streamed) == whole.choices[0].text != ""


def test_tools_are_called_and_their_results_go_back(litellm: Any, demo: RunningServer):
    async def talk() -> tuple[Any, Any, Any]:
        fields = asked(demo, tools=[PAINT], tool_choice="required", parallel_tool_calls=False)
        message = (await litellm.acompletion(**fields)).choices[0].message
        chunks = [chunk async for chunk in await litellm.acompletion(**fields, stream=True)]
        streamed = litellm.stream_chunk_builder(chunks, messages=MESSAGES).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "dry"}
        turns = [*MESSAGES, message, result]
        final = await litellm.acompletion(**asked(demo, messages=turns, tools=[PAINT], tool_choice="none"))
        return message, streamed, final.choices[0].message

    message, streamed, final = asyncio.run(talk())
    (call,) = message.tool_calls
    assert call.function.name == "paint" and Coat.model_validate_json(call.function.arguments)
    assert [made.function.arguments for made in streamed.tool_calls] == [call.function.arguments]
    assert final.content and not final.tool_calls


def test_a_model_that_calls_by_itself_is_understood(litellm: Any, parrot: RunningServer):
    call = '<tool_call>\n{"name": "paint", "arguments": {"colour": "blue", "layers": 2}}\n</tool_call>'
    fields = asked(parrot, messages=[{"role": "user", "content": f"On it. {call}"}], tools=[PAINT])
    choice = litellm.completion(**fields).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content.strip() == "On it."
    (made,) = choice.message.tool_calls
    assert json.loads(made.function.arguments) == {"colour": "blue", "layers": 2}


def test_a_class_may_be_the_form_of_an_answer(litellm: Any, demo: RunningServer):
    answer = litellm.completion(**asked(demo, response_format=Coat))
    assert Coat.model_validate_json(answer.choices[0].message.content)


def test_embeddings_come_in_their_order(litellm: Any, demo: RunningServer):
    where = {name: asked(demo)[name] for name in ("model", "api_base", "api_key")}
    both = litellm.embedding(**where, input=["the sky", "a dog"])
    alone = litellm.embedding(**where, input=["a dog"])
    assert [item["index"] for item in both.data] == [0, 1] and both.usage.prompt_tokens > 0
    assert np.allclose(both.data[1]["embedding"], alone.data[0]["embedding"], atol=1e-2)


def test_errors_have_the_packages_own_classes(litellm: Any, demo: RunningServer):
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**asked(demo, api_key="wrong"))
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**asked(demo, model="openai/other"))
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked(demo, messages=[{"role": "user", "content": "sky " * 4000}]))
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asked(demo, temperature=9))
