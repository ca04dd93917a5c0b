"""Beam search over HTTP: the best answers in order, their cost, and errors."""

from __future__ import annotations

import pytest

from tests.deploy.running import RunningServer, post_bytes, send

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Tell me a story"}]


def body_for(path: str, **fields: object) -> dict[str, object]:
    asked = {"messages": MESSAGES} if path == CHAT else {"prompt": "Once upon a time"}
    return asked | {"use_beam_search": True, "max_tokens": 6, "ignore_eos": True} | fields


def counter(server: RunningServer, name: str) -> float:
    lines = server.get("/metrics").body.decode().splitlines()
    return float(next(line for line in lines if line.startswith(name + "{")).split()[-1])


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_the_n_best_are_told_apart_and_counted_once(server: RunningServer, path):
    before = [counter(server, f"vllm:{name}_tokens_total") for name in ("prompt", "generation")]
    answer = server.post(path, body_for(path, n=2, best_of=4, logprobs=2 if path == TEXT else None))
    assert answer.status == 200, answer.json
    choices = answer.json["choices"]
    assert [(choice["index"], choice["finish_reason"]) for choice in choices] == [(0, "length"), (1, "length")]
    texts = [choice["message"]["content"] if path == CHAT else choice["text"] for choice in choices]
    assert len(set(texts)) == 2 and all(texts)
    prompt = len("Tell me a story") + 3 if path == CHAT else len("Once upon a time")
    usage = answer.json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 12)
    after = [counter(server, f"vllm:{name}_tokens_total") for name in ("prompt", "generation")]
    assert [late - early for early, late in zip(before, after, strict=True)] == [prompt, 12]
    if path == TEXT:
        assert all("".join(choice["logprobs"]["tokens"]) == choice["text"] for choice in choices)
    server.wait_until_idle()


def test_the_tokens_of_a_search_came_when_it_ended(server: RunningServer):
    answer = server.post(TEXT, body_for(TEXT, n=2, logprobs=1, return_token_details=True)).json
    times = [detail["time_ms"] for one in answer["choices"] for detail in one["logprobs"]["details"]]
    assert len(times) == 12 and all(times) and times == sorted(times)


def test_each_prompt_has_a_search_of_its_own(server: RunningServer):
    both = server.post(TEXT, body_for(TEXT, prompt=["abc", "xyz"], n=2)).json["choices"]
    alone = [server.post(TEXT, body_for(TEXT, prompt=prompt, n=2)).json["choices"] for prompt in ("abc", "xyz")]
    assert [choice["text"] for choice in both] == [choice["text"] for one in alone for choice in one]
    assert [choice["index"] for choice in both] == [0, 1, 2, 3]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"stream": True}, "stream", "not supported with use_beam_search"),
        ({"temperature": 0.7}, "temperature", "not supported by a beam search"),
        ({"n": 65}, "n", "must be a whole number from 1 to 64"),
        ({"max_tokens": 2000}, None, "context length is 512 tokens"),
    ],
)
def test_an_impossible_search_is_400_and_says_why(server: RunningServer, path, fields, param, says):
    answer = server.post(path, body_for(path, **fields))
    assert answer.status == 400 and says in answer.error["message"]
    assert answer.error["param"] == (param or ("messages" if path == CHAT else "prompt"))


def test_a_search_whose_client_leaves_ends_at_once(slow_server: RunningServer):
    with slow_server.connect() as connection:
        send(connection, post_bytes(TEXT, body_for(TEXT, n=4, max_tokens=400)))
        while not slow_server.stats()["sequences"]:
            pass
    assert slow_server.wait_until_idle() < 2.0
