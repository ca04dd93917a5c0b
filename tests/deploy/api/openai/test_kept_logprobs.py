"""Log-probabilities of answers that are not streamed: bounded, and written while they come."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import orjson
import pytest

from millrace.deploy.api.chat.answers import ChatAnswerBuilder
from millrace.deploy.api.completions.answers import CompletionAnswerBuilder
from millrace.deploy.api.openai.answers import AnswerBuilder, PromptEcho
from millrace.deploy.api.openai.choice_state import ChoiceState
from millrace.deploy.api.openai.logprob_fields import chat_logprobs, completion_logprobs
from millrace.deploy.api.token_ids.body import TokenIdsAnswerBuilder
from millrace.stages.errors import Refused
from millrace.stages.messages import Prompt, Request, TokenLogprobs
from millrace.stages.outputs import ChoiceDelta
from millrace.stages.params import SamplingParams
from millrace.stages.request_limits import RequestLimits

ECHO = {"tokens": ["Hi"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}


def scored(count: int) -> list[TokenLogprobs]:
    def one(n: int) -> TokenLogprobs:
        top = ((n, f"t{n}", b"t", -0.5 * n), (9, "ü", b"\xc3", -7.0))
        return TokenLogprobs(n, f"t{n}", f"t{n}".encode(), -0.5 * n, 1, top)

    return [one(n) for n in range(count)]


def kept(shape: type[AnswerBuilder], tokens: list[TokenLogprobs], prompts: dict[int, PromptEcho] | None = None) -> dict:
    """The only choice of the answer, as a client gets it, from deltas of some tokens each."""
    draw, answer, at = Random(3), shape("a", 0, "m", False, False), 0
    answer.prompts = prompts or {}
    (choice,) = choices = answer.choices(1)
    while at < len(tokens):
        some = tokens[at : at + draw.randrange(1, 4)]
        at += len(some)
        ids, text = tuple(token.token_id for token in some), "".join(token.token for token in some)
        answer.keep(choice, ChoiceDelta(0, text, ids, tuple(some)))
        assert not choice.logprobs  # nothing is left to write at the end
    answer.keep(choice, ChoiceDelta(0, "", (), finish_reason="length"))
    return orjson.loads(orjson.dumps(answer.whole(choices, {})))["choices"][0]


@pytest.mark.parametrize("count", [1, 2, 30])
def test_logprobs_written_as_they_come_are_those_written_at_once(count: int):
    tokens = scored(count)
    assert kept(ChatAnswerBuilder, tokens)["logprobs"] == chat_logprobs(tokens)
    assert kept(CompletionAnswerBuilder, tokens)["logprobs"] == completion_logprobs(tokens)
    as_ids = completion_logprobs(tokens, as_ids=True)
    assert kept(TokenIdsAnswerBuilder, tokens)["logprobs"] == as_ids


@pytest.mark.parametrize("shape", [ChatAnswerBuilder, CompletionAnswerBuilder, TokenIdsAnswerBuilder])
def test_details_of_tokens_are_added_on_request_only(shape: type[AnswerBuilder]):
    tokens = [replace(token, time_us=2_000_000 + 1500 * token.token_id) for token in scored(3)]
    answer = shape("a", 0, "m", False, False, details_since_s=2.0)
    (choice,) = answer.choices(1)
    shown = answer.logprob_lists(choice, [*tokens[:2], replace(tokens[2], is_drafted=True)])
    assert [(detail["token_id"], detail["time_ms"], detail["is_drafted"]) for detail in shown["details"]] == [
        *((0, 0.0, False), (1, 1.5, False), (2, 3.0, True))
    ]
    assert shown["details"][1]["top"] == [
        *({"token_id": 1, "token": "t1", "logprob": -0.5}, {"token_id": 9, "token": "ü", "logprob": -7.0})
    ]
    assert "details" not in shape("a", 0, "m", False, False).logprob_lists(choice, tokens)


def test_an_echoed_prompt_comes_before_the_logprobs_of_its_answer():
    tokens, echo = scored(5), {0: PromptEcho(text="Hi", logprobs=ECHO)}
    choice = kept(CompletionAnswerBuilder, tokens, echo)
    assert choice["text"] == "Hit0t1t2t3t4" and choice["logprobs"]["tokens"] == ["Hi", "t0", "t1", "t2", "t3", "t4"]
    assert choice["logprobs"]["text_offset"] == [0, 2, 4, 6, 8, 10]
    assert kept(CompletionAnswerBuilder, [], echo)["logprobs"] == ECHO


@pytest.mark.parametrize("shape", [ChatAnswerBuilder, CompletionAnswerBuilder, TokenIdsAnswerBuilder])
def test_an_answer_whose_only_token_a_stop_string_took_has_empty_logprobs(shape: type[AnswerBuilder]):
    choice = ChoiceState(0)
    answer = shape("a", 0, "m", False, False)
    answer.keep(choice, ChoiceDelta(0, "", (7,), (), "stop", "x"))
    lists = orjson.loads(orjson.dumps(answer.whole([choice], {})))["choices"][0]["logprobs"]
    assert lists and not any(lists.values())


def test_logprobs_of_one_request_are_bounded_before_they_are_computed():
    limits = RequestLimits(vocab_size=100, max_model_len=2_048)

    def check(**params: int) -> None:
        limits.check(Request("a", (Prompt(text="a"),), SamplingParams(**params)))

    with pytest.raises(Refused, match="answers x max_tokens must be at most 49932") as refused:
        check(n=128, logprobs=20, max_tokens=1_900)
    assert refused.value.param == "logprobs"
    check(n=26, logprobs=20, max_tokens=1_900)
    check(n=128, max_tokens=1_900)
    check(logprobs=20, max_tokens=1_900)


def test_without_max_tokens_an_answer_ends_where_its_logprobs_reach_the_bound():
    limits = RequestLimits(vocab_size=100, max_model_len=1_000_000)
    assert limits.complete_params(SamplingParams(max_tokens=None, logprobs=20), 10).max_tokens == 49_932
    assert limits.complete_params(SamplingParams(max_tokens=None, logprobs=20, n=4), 10).max_tokens == 12_483
    answers = SamplingParams(max_tokens=None, logprobs=20, n=2)
    assert limits.complete_params(answers, 10, num_prompts=2).max_tokens == 12_483
    assert limits.complete_params(SamplingParams(max_tokens=None), 10).max_tokens == 999_990
