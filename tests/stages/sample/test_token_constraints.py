"""Token constraints: allowed tokens, bad words, a logits processor; and log-probabilities of the remaining tokens."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.stages import Engine, LogitsProcessor, SamplingParams
from millrace.stages.errors import Failed, Refused
from millrace.stages.messages import FinishReason
from millrace.stages.request_limits import RequestLimits
from millrace.stages.sample.sampler import Sampler
from millrace.stages.testing.scripted.byte_tokenizer import ByteTokenizer
from millrace.stages.testing.scripted.engine import scripted_engine
from millrace.stages.tokenize.stage import with_bad_words
from tests.stages.grants import decode, started

V, EOS = 40, 39


def make(mode="raw_logprobs") -> Sampler:
    return Sampler(torch.zeros(4, dtype=torch.int64), V, 64, (EOS,), logprobs_mode=mode)


def falling() -> torch.Tensor:
    """Token 0 is the likeliest, then 1, and so on."""
    return -torch.arange(V, dtype=torch.float32)[None]


def answer(sampler: Sampler, num_tokens: int, generated=(), **params) -> list[int]:
    tokens = [sampler.sample(decode(0, started=[started(0, answer=generated, **params)]), falling())]
    tokens += [sampler.sample(decode(0), falling()) for _ in range(num_tokens - 1)]
    return [int(step.token_ids[0]) for step in tokens]


# -- allowed


def test_only_allowed_tokens_are_chosen_whatever_the_others_in_the_step_may():
    sampler = make()
    first = [
        started(0, allowed_token_ids=(7, 5, EOS)),
        started(1),
        started(2, temperature=1.0, allowed_token_ids=(30,)),
    ]
    tokens = sampler.sample(decode(0, 1, 2, started=first), falling().repeat(3, 1))
    assert tokens.token_ids.tolist() == [5, 0, 30]
    tokens = sampler.sample(decode(0, started=[started(0)]), falling())
    assert tokens.token_ids.tolist() == [0], "the slot belongs to another sequence now"


def test_a_row_that_may_choose_nothing_ends_with_an_error():
    tokens = make().sample(decode(0, started=[started(0, allowed_token_ids=(EOS,), min_tokens=3)]), falling())
    assert tokens.finishes.tolist() == [FinishReason.ERROR]


# -- bad words


def test_a_bad_word_never_occurs_whether_of_one_token_or_several():
    assert answer(make(), 3, bad_words_token_ids=((0,),)) == [1, 1, 1]
    assert answer(make(), 5, bad_words_token_ids=((0, 0),)) == [0, 1, 0, 1, 0]
    assert answer(make(), 6, bad_words_token_ids=((0, 0, 0), (0, 1), (2, 0))) == [0, 0, 2, 1, 0, 0]


def test_a_bad_word_continues_after_a_preemption_and_does_not_begin_in_the_prompt():
    assert answer(make(), 1, generated=(5, 6), bad_words_token_ids=((5, 6, 0),)) == [1]
    assert answer(make(), 1, prompt=(5, 6), bad_words_token_ids=((5, 6, 0),)) == [0]


def test_words_are_forbidden_with_and_without_a_leading_space():
    class Words(ByteTokenizer):
        def encode_words(self, text: str) -> list[int]:
            known = {"fie": [7], " fie": [8], "zounds": [3, 4], " zounds": [5, 6, 4], "x": [9], " x": [9]}
            return known[text]

    params = with_bad_words(Words(), SamplingParams(bad_words=("fie", " zounds", "x"), bad_words_token_ids=((1, 2),)))
    assert params.bad_words == () and params.bad_words_token_ids == ((1, 2), (7,), (8,), (3, 4), (9,))


# -- log-probabilities


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_are_the_models_own_or_those_that_tokens_are_drawn_by(mode):
    sampler = make(mode)
    asked = {"logprobs": 3, "logit_bias": {5: 20.0}, "temperature": 2.0, "top_k": 2, "seed": 1}
    first = [started(0, **asked), started(1, logprobs=3, logit_bias={5: 20.0}), started(2, temperature=1.0)]
    tokens = sampler.sample(decode(0, 1, 2, started=first), falling().repeat(3, 1))
    edited = falling()[0] + 20.0 * (torch.arange(V) == 5)
    drawn = torch.where((torch.arange(V) == 5) | (torch.arange(V) == 0), edited / 2.0, -torch.inf)
    right = [falling()[0]] * 2 if mode == "raw_logprobs" else [drawn, edited]
    for row, logits in enumerate(right):
        told, logprobs = tokens.logprobs[row], logits.log_softmax(0)
        assert told.chosen == pytest.approx(float(logprobs[tokens.token_ids[row]]), abs=1e-5)
        kept = [value for value in told.logprobs if np.isfinite(value)]
        np.testing.assert_allclose(kept, logprobs.topk(3).values[: len(kept)], atol=1e-5)
    assert 2 not in tokens.logprobs


# -- a processor


class NeverTwice(LogitsProcessor):
    """Forbids that a token follows itself, in the rows that request it."""

    def __init__(self) -> None:
        self.newest: dict[int, int] = {}

    def start(self, started) -> bool:
        self.newest[started.slot] = int(started.token_ids[-1])
        return started.params.extra_args.get("never_twice", False)

    def process(self, slots, logits) -> None:
        logits[range(len(slots)), [self.newest[slot] for slot in slots.tolist()]] = -torch.inf

    def note(self, slots, token_ids) -> None:
        self.newest.update(zip(slots.tolist(), token_ids.tolist(), strict=True))


def test_a_processor_changes_the_rows_that_want_it_and_no_others():
    sampler = make()
    sampler.use(NeverTwice())
    first = [started(0, extra_args={"never_twice": True}), started(1)]
    steps = [sampler.sample(decode(0, 1, started=first), falling().repeat(2, 1))]
    steps += [sampler.sample(decode(0, 1), falling().repeat(2, 1)) for _ in range(3)]
    assert [step.token_ids.tolist() for step in steps] == [[0, 0], [1, 0], [0, 0], [1, 0]]
    alone = sampler.sample(decode(0, started=[started(0, (0,), extra_args={"never_twice": True})]), falling())
    assert alone.token_ids.tolist() == [1]


async def _one_that_raises() -> None:
    class Broken(LogitsProcessor):
        def start(self, started) -> bool:
            return "broken" in started.params.extra_args

        def process(self, slots, logits) -> None:
            raise RuntimeError("a user's bug")

    async with Engine(logits_processor=Broken(), max_num_seqs=8, max_model_len=64, num_gpu_blocks=32) as engine:

        async def ask(**args):
            params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, extra_args=args)
            return [o async for o in engine.generate("Once", params, output_kind="final")][-1].num_generated_tokens

        found = await asyncio.gather(ask(), ask(broken=1), ask(), return_exceptions=True)
        assert [type(one) for one in found] == [int, Failed, int] and found[0] == found[2] == 8


@pytest.mark.slow
def test_a_processor_that_raises_fails_its_own_request_and_no_other():
    asyncio.run(_one_that_raises())


# -- truncation


def test_a_prompt_is_cut_to_its_last_tokens_or_its_first():
    limits, ids = RequestLimits(256, 10), np.arange(20, dtype=np.int32)

    def left(**params) -> list[int]:
        return limits.truncate(SamplingParams(**params), ids).tolist()

    assert left() == ids.tolist()
    assert left(truncate_prompt_tokens=3) == [17, 18, 19]
    assert left(truncate_prompt_tokens=3, truncation_side="right") == [0, 1, 2]
    assert left(truncate_prompt_tokens=30) == ids.tolist()
    assert left(truncate_prompt_tokens=-1, max_tokens=4) == ids[-6:].tolist()
    assert len(left(truncate_prompt_tokens=-1, max_tokens=None)) == 9
    for wrong in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -2}, {"truncation_side": "top"}):
        with pytest.raises(Refused):
            SamplingParams(**wrong)


@sim_test(seeds=1)
async def test_what_is_left_of_a_prompt_is_computed_and_counted(env: SimEnv):
    async with scripted_engine(env=env, max_model_len=32) as engine:
        for prompt in ("x" * 60 + "Hello", list(b"x" * 60 + b"Hello")):
            params = SamplingParams(truncate_prompt_tokens=5, max_tokens=3, temperature=0.0)
            outputs = [o async for o in engine.generate(prompt, params, output_kind="final")]
            assert (outputs[-1].num_prompt_tokens, outputs[-1].prompt_token_ids) == (5, list(b"Hello"))
