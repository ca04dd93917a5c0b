"""Prompt data in answers over HTTP: `echo`, `prompt_logprobs`, `return_token_ids`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from millrace.deploy.api.chat.answers import ChatAnswerBuilder
from millrace.deploy.api.openai.choice_state import ChoiceState
from millrace.deploy.api.openai.prompt_echo import EchoOptions, echo_prompt
from millrace.stages.errors import Refused
from millrace.stages.messages import Prompt, Request
from millrace.stages.params import SamplingParams
from millrace.stages.testing.scripted.engine import scripted_engine
from tests.deploy.running import RunningServer
from tests.deploy.sockets import on_loop, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hé"}]
RENDERED = [258, 104, 0xC3, 0xA9, 256, 259]


def complete(server: RunningServer, prompt: object = "Zoé", path: str = TEXT, **fields: object) -> dict:
    subject = {"messages": MESSAGES} if path == CHAT else {"prompt": prompt}
    answer = server.post(path, {"max_tokens": 4, "temperature": 0, "ignore_eos": True} | subject | fields)
    assert answer.status == 200, answer.body
    return answer.json


def score(token_id: int, position: int) -> float:
    """The log-probability that the scripted device computes."""
    return -(token_id % 64) / 8 - (position % 2) / 16


def test_echo_prepends_the_prompt(server):
    plain, echoed = (complete(server, **echo)["choices"][0] for echo in ({}, {"echo": True}))
    assert echoed["text"] == "Zoé" + plain["text"]
    ids = complete(server, [90, 111], echo=True)["choices"][0]["text"]
    assert ids.startswith("Zo") and len(ids) == 6


def test_an_evaluation_harness_asks_for_the_prompt_alone(server):
    """echo, max_tokens 0, logprobs 1: the log-likelihood of a text, token by token."""
    answer = complete(server, [list(b"Zo\xc3\xa9"), [7]], echo=True, max_tokens=0, logprobs=1)
    first, second = answer["choices"]
    assert first["text"] == "Zoé" and first["finish_reason"] == "length"
    logprobs = first["logprobs"]
    assert logprobs["tokens"] == ["Z", "o", "\ufffd", "\ufffd"] and logprobs["text_offset"] == [0, 1, 2, 2]
    right = [score(token_id, at) for at, token_id in enumerate(b"Zo\xc3\xa9")]
    assert logprobs["token_logprobs"] == [None, *right[1:]]
    assert logprobs["top_logprobs"][:2] == [None, {"o": right[1]}]
    assert second["logprobs"]["token_logprobs"] == [None]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 0,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_with_tokens_asked_for_the_answers_own_follow_in_the_same_arrays(server):
    (choice,) = complete(server, "Hi", echo=True, logprobs=0, max_tokens=3)["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == list(choice["text"]) and logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["token_logprobs"] == [None, score(ord("i"), 1), -0.5, -0.5, -0.5]
    assert all(len(column) == 5 for column in logprobs.values())


def test_an_echo_is_streamed_with_the_first_piece_of_each_choice(server):
    body = {"prompt": ["Zoé", "Ann"], "max_tokens": 4, "ignore_eos": True, "temperature": 0, "echo": True}
    body["stream"] = True
    for more in ({"logprobs": 1}, {"n": 3}):
        whole = complete(server, **(body | more | {"stream": False}))["choices"]
        chunks = [e["choices"][0] for e in server.post(TEXT, body | more).events()[:-1]]
        for choice in whole:
            mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
            assert "".join(chunk["text"] for chunk in mine) == choice["text"]
            if "logprobs" in more:
                for name, column in choice["logprobs"].items():
                    assert sum((chunk["logprobs"][name] for chunk in mine if chunk["logprobs"]), []) == column


def test_an_echo_with_logprobs_of_several_choices_is_not_streamed(server):
    body = {"prompt": "Hi", "echo": True, "stream": True, "logprobs": 1, "n": 2}
    assert server.post(TEXT, body).error["param"] == "echo"


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_prompt_logprobs_have_one_entry_a_token_and_none_for_the_first(server, path):
    answer = complete(server, list(RENDERED), path, prompt_logprobs=2)
    holder = answer if path == CHAT else answer["choices"][0]
    first, *others = holder["prompt_logprobs"]
    assert first is None and len(others) == len(RENDERED) - 1
    assert others[0] == {
        "104": {"logprob": score(104, 1), "rank": 1, "decoded_token": "h"},
        "105": {"logprob": score(104, 1) - 1, "rank": 2, "decoded_token": "i"},
    }
    for at, (token_id, entry) in enumerate(zip(RENDERED[1:], others, strict=True), 1):
        assert entry[str(token_id)]["logprob"] == score(token_id, at)


def test_of_a_long_prompt_as_many_are_told_as_fit_the_bytes_a_request_may_have(server):
    prompts = [[65] * 500] * 110
    assert server.post(TEXT, {"prompt": prompts[:5], "prompt_logprobs": 20, "max_tokens": 1}).status == 200
    refused = server.post(TEXT, {"prompt": prompts, "echo": True, "logprobs": 20, "max_tokens": 0})
    assert (refused.status, refused.error["param"]) == (400, "logprobs")


def test_token_ids_of_prompt_and_answer_are_told(server):
    text = complete(server, "Hi", return_token_ids=True)["choices"][0]
    assert text["prompt_token_ids"] == [72, 105] and bytes(text["token_ids"]).decode() == text["text"]
    chat = complete(server, path=CHAT, return_token_ids=True)
    assert chat["prompt_token_ids"] == RENDERED and len(chat["choices"][0]["token_ids"]) == 4
    plain = complete(server, path=CHAT)
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]


def test_in_a_stream_the_prompts_ids_come_once_and_the_answers_with_each_piece(server):
    body = {"max_tokens": 4, "stream": True, "return_token_ids": True, "ignore_eos": True}
    *chunks, _ = server.post(CHAT, body | {"messages": MESSAGES}).events()
    assert chunks[0]["prompt_token_ids"] == RENDERED
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    assert sum(len(chunk["choices"][0].get("token_ids", ())) for chunk in chunks) == 4
    *chunks, _ = server.post(TEXT, body | {"prompt": ["Hi", "You"], "n": 2}).events()
    for index in range(4):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["prompt_token_ids"] == list((b"Hi", b"You")[index // 2])
        assert not any("prompt_token_ids" in chunk for chunk in mine[1:])


def test_tokens_in_logprobs_may_be_spelled_as_ids(server):
    (choice,) = complete(server, "Hi", echo=True, logprobs=1, return_tokens_as_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"][:2] == ["token_id:72", "token_id:105"]
    assert [f"token_id:{ord(c)}" for c in choice["text"]] == choice["logprobs"]["tokens"]
    chat = complete(server, path=CHAT, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    (entry, *_) = chat["choices"][0]["logprobs"]["content"]
    assert entry["token"] == entry["top_logprobs"][0]["token"] == f"token_id:{entry['bytes'][0]}"


def test_half_characters_add_no_text_and_a_whole_one_adds_it_with_its_last_byte():
    from millrace.deploy.api.openai.prompt_echo import token_texts
    from millrace.stages.testing.scripted.byte_tokenizer import ByteTokenizer

    tokenizer = ByteTokenizer()
    assert token_texts(tokenizer, [257, *"é!".encode(), 0xC3, 256, 0xE2]) == ["", "", "é", "!", "", "\ufffd", "\ufffd"]


class _Spells:
    """A tokenizer over "▁" pieces, with one special token."""

    special_ids = frozenset({0})

    def __init__(self, strips_first_space: bool) -> None:
        self.strips_first_space = strips_first_space

    def token_bytes(self, token_id: int) -> bytes:
        return [b"<s>", b" Once", b" upon"][token_id]


@pytest.mark.parametrize(("strips", "text"), [(True, "Once upon"), (False, " Once upon")])
def test_an_echo_of_token_ids_is_their_text_as_the_tokenizer_decodes_it(strips: bool, text: str):
    prompt = Prompt(token_ids=np.array([0, 1, 2], np.int32))
    request = Request("r", (prompt,), SamplingParams(max_tokens=1))
    outbox: Any = SimpleNamespace(request=request, prompt_token_ids=lambda index: prompt.token_ids)
    assert echo_prompt(EchoOptions(echo=True), outbox, _Spells(strips), 0).text == text


@on_loop
async def test_a_prompt_that_fills_the_context_is_scored_with_no_token_after_it():
    params = SamplingParams(max_tokens=0, repetition_penalty=1.1)
    async with scripted_engine(max_model_len=64) as engine:
        for num_tokens in (63, 64):
            outputs = [output async for output in engine.generate([97] * num_tokens, params)]
            assert (outputs[-1].num_prompt_tokens, outputs[-1].outputs[0].finish_reason) == (num_tokens, "length")
            assert outputs[-1].num_generated_tokens == 0
        for num_tokens, max_tokens in ((65, 0), (64, 1)):
            with pytest.raises(Refused, match="maximum context length is 64"):
                async for _ in engine.generate([97] * num_tokens, SamplingParams(max_tokens=max_tokens)):
                    pass
        await engine.check_quiet()


@on_loop
async def test_logprobs_of_an_empty_answer_are_empty_lists():
    async with serving() as running:
        body = {"prompt": "hi", "max_tokens": 0, "prompt_logprobs": 0}
        empty: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for logprobs, right in ((1, empty), (None, None)):
            async with running.http.post(running.server.url + TEXT, json=body | {"logprobs": logprobs}) as got:
                assert (await got.json())["choices"][0]["logprobs"] == right
    for wanted, right in ((True, {"content": []}), (False, None)):
        answer = ChatAnswerBuilder("id", 0, "m", False, False, has_logprobs=wanted)
        assert orjson.loads(orjson.dumps(answer.whole([ChoiceState(0)], {})))["choices"][0]["logprobs"] == right
