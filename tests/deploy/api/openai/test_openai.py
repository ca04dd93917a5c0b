"""The official OpenAI client against the server, unmodified except for its base URL."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.deploy.running import RunningServer

MESSAGES = [{"role": "user", "content": "Tell me a story"}]
GREEDY = {"model": "scripted", "temperature": 0, "max_tokens": 30, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_chat_answers_and_streams_the_same(client: openai.OpenAI):
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    text = whole.choices[0].message.content
    assert text and whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 30
    stream = client.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    told, counted = chunks[-1].usage, whole.usage  # the second request finds more of its prompt cached
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(told, name) == getattr(counted, name)


def test_completions_answer_and_stream_the_same(client: openai.OpenAI):
    whole = client.completions.create(prompt="Once upon", **GREEDY)
    chunks = list(client.completions.create(prompt="Once upon", stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_a_stop_string_ends_the_answer(client: openai.OpenAI):
    text = client.completions.create(prompt="Once", **GREEDY).choices[0].text
    stop = next(letter for letter in text[2:] if letter.isascii() and letter.isalpha())
    choice = client.completions.create(prompt="Once", stop=[stop], **GREEDY).choices[0]
    assert choice.finish_reason == "stop" and choice.text == text[: text.index(stop)]


def test_a_seed_repeats_the_answer_and_choices_differ(client: openai.OpenAI):
    asked = GREEDY | {"temperature": 1.0, "seed": 11, "n": 3}
    first, second = (client.chat.completions.create(messages=MESSAGES, **asked) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) == 3 and [choice.index for choice in first.choices] == [0, 1, 2]


def test_logprobs_come_in_both_shapes(client: openai.OpenAI):
    chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY).choices[0]
    assert "".join(entry.token for entry in chat.logprobs.content) == chat.message.content
    assert all(len(entry.top_logprobs) == 2 for entry in chat.logprobs.content)
    plain = client.completions.create(prompt="Once", logprobs=2, **GREEDY).choices[0]
    assert "".join(plain.logprobs.tokens) == plain.text


def test_errors_have_the_clients_own_classes(client: openai.OpenAI, server: RunningServer):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(messages=MESSAGES, **GREEDY | {"temperature": 9})
    assert (refused.value.param, refused.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(messages=MESSAGES, model="other")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(prompt="a" * 600, model="scripted")
    assert long.value.code == "context_length_exceeded"
    assert (
        "this model's maximum context length is 512 tokens" in long.value.message
    )  # values that client programs check


def test_a_wrong_key_and_a_full_house_have_their_classes():
    with RunningServer(server={"api_key": ["right"]}, engine={"max_admitted_requests": 1}, step_s=0.01) as server:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as wrong:
            with pytest.raises(openai.AuthenticationError):
                wrong.models.list()
        with openai.OpenAI(base_url=server.url + "/v1", api_key="right", max_retries=0) as right:
            assert [model.id for model in right.models.list()] == ["scripted"]
            asked = {"model": "scripted", "max_tokens": 400, "extra_body": {"ignore_eos": True}}
            with right.completions.create(prompt="a", stream=True, **asked) as busy:
                next(iter(busy))
                with pytest.raises(openai.RateLimitError) as full:
                    right.completions.create(prompt="b", **asked)
        assert full.value.type == "overloaded_error"
        assert int(full.value.response.headers["retry-after"]) >= 1
        assert full.value.body["details"]["queue_depth"] == 0


def test_32_streams_at_once_never_mix(server: RunningServer):
    async def ask(client: openai.AsyncOpenAI, i: int) -> tuple[str, str]:
        asked = GREEDY | {"temperature": 1.0, "seed": i, "max_tokens": 60}
        prompt = f"story number {i}"
        alone = await client.completions.create(prompt=prompt, **asked)
        pieces = []
        async with await client.completions.create(prompt=prompt, stream=True, **asked) as stream:
            async for chunk in stream:
                assert chunk.choices[0].index == 0
                pieces.append(chunk.choices[0].text)
        return alone.choices[0].text, "".join(pieces)

    async def ask_all() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(32)))

    answers = asyncio.run(ask_all())
    assert all(whole == streamed for whole, streamed in answers)
    assert len({whole for whole, _ in answers}) == 32
