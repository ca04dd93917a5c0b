"""Ollama's Python client, unmodified: lists, details, chats, prompts, embeddings, streams, tools and errors."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.clients.conftest import KEY
from tests.deploy.running import RunningServer

pytestmark = [
    pytest.mark.clients,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ollama") is None, reason="ollama is missing: pip install -e '.[test]'"
    ),
]

MESSAGES = [{"role": "user", "content": "What colour is the sky?"}]
GREEDY = {"temperature": 0, "num_predict": 40}
COAT = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "layers": {"type": "integer", "maximum": 3}},
    "required": ["colour", "layers"],
    "additionalProperties": False,
}


def client_of(server: RunningServer, key: str = KEY) -> Any:
    import ollama

    return ollama.Client(server.url, headers={"Authorization": f"Bearer {key}"})


@pytest.fixture
def client(demo: RunningServer) -> Iterator[Any]:
    made = client_of(demo)
    yield made
    made.close()


def test_models_are_listed_loaded_and_shown(client: Any):
    (listed,) = client.list().models
    (loaded,) = client.ps().models
    assert listed.model == loaded.model == "demo:latest" and listed.size > 0 and len(listed.digest) == 64
    assert loaded.expires_at > listed.modified_at and loaded.context_length > 0
    for name in ("demo", "demo:latest"):
        shown = client.show(name)
        assert "completion" in shown.capabilities and shown.template
        assert shown.modelinfo["general.parameter_count"] > 0 and shown.details.family == "llama"


def test_a_chat_answers_and_streams_the_same(client: Any):
    whole = client.chat("demo", MESSAGES, options=GREEDY)
    chunks = list(client.chat("demo:latest", MESSAGES, options=GREEDY, stream=True))
    assert "".join(chunk.message.content for chunk in chunks) == whole.message.content != ""
    assert chunks[-1].done and [chunk.done for chunk in chunks[:-1]] == [False] * (len(chunks) - 1)
    assert chunks[-1].eval_count == whole.eval_count > 0 and whole.done_reason in ("stop", "length")
    assert whole.total_duration > whole.eval_duration > 0 and whole.prompt_eval_count > 0


def test_a_prompt_is_completed_and_its_context_goes_on(client: Any):
    raw = client.generate("demo", "Once upon a time", raw=True, options=GREEDY)
    streamed = client.generate("demo", "Once upon a time", raw=True, options=GREEDY, stream=True)
    assert "".join(chunk.response for chunk in streamed) == raw.response != ""
    first = client.generate("demo", "What colour is the sky?", options=GREEDY)
    second = client.generate("demo", "And the sea?", context=first.context, options=GREEDY)
    assert list(second.context[: len(first.context)]) == list(first.context)
    assert second.prompt_eval_count > len(first.context)


def test_an_answer_keeps_the_form_that_is_asked_for(client: Any):
    made = json.loads(client.chat("demo", MESSAGES, format=COAT, options={"temperature": 0}).message.content)
    assert made["colour"] in ("red", "green", "blue") and made["layers"] <= 3
    longest = {"temperature": 0, "num_predict": 120}
    assert client.chat("demo", MESSAGES, format="json", options=longest).message.content.lstrip().startswith("{")


def test_vectors_come_in_their_order(client: Any):
    both = client.embed("demo", ["the sky", "a dog"])
    alone = client.embed("demo", "a dog")
    assert np.allclose(both.embeddings[1], alone.embeddings[0], atol=1e-2)
    assert np.isclose(np.linalg.norm(alone.embeddings[0]), 1, atol=1e-4)
    assert len(client.embeddings("demo", "a dog").embedding) == len(alone.embeddings[0])


def test_a_function_is_offered_and_its_call_comes_as_an_object(parrot: RunningServer):
    def paint(colour: str, layers: int) -> str:
        """Paint it.

        Args:
            colour: which colour
            layers: how many layers
        """
        return f"{layers} layers of {colour}"

    call = '<tool_call>\n{"name": "paint", "arguments": {"colour": "blue", "layers": 2}}\n</tool_call>'
    turns = [{"role": "user", "content": call}]
    with client_of(parrot) as client:
        answer = client.chat("demo", turns, tools=[paint])
        (made,) = answer.message.tool_calls
        assert made.function.name == "paint" and made.function.arguments == {"colour": "blue", "layers": 2}
        result = {"role": "tool", "tool_name": "paint", "content": paint(**made.function.arguments)}
        thanks = {"role": "user", "content": "thanks"}
        assert client.chat("demo", [*turns, answer.message, result, thanks]).message.content == "thanks"


def test_only_the_served_model_is_pulled_and_errors_are_the_clients_own(client: Any, demo: RunningServer):
    import ollama

    assert client.pull("demo").status == "success"
    assert [state.status for state in client.pull("demo", stream=True)] == ["success"]
    wrong: list[tuple[int, str, Any]] = [
        (404, "not found", lambda: client.chat("other", MESSAGES)),
        (404, "millrace serve other", lambda: client.pull("other")),
        (400, "options.temperature = 9", lambda: client.chat("demo", MESSAGES, options={"temperature": 9})),
        (400, "maximum context length", lambda: client.generate("demo", "sky " * 4000)),
        (400, "images", lambda: client.generate("demo", "What is it?", images=["aGVsbG8="])),
        (403, "model", lambda: client.copy("demo", "other")),
        (403, "stop the server", lambda: client.delete("demo")),
        (403, "millrace serve", lambda: client.create("mine", from_="demo")),
        (401, "API key", lambda: client_of(demo, "wrong").list()),
    ]
    for status, words, ask in wrong:
        with pytest.raises(ollama.ResponseError, match=words) as refused:
            ask()
        assert refused.value.status_code == status
