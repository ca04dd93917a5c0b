"""Steps that need the host among steps that do not: answers equal those of a synchronous device."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.runtime.env.env import LiveEnv
from millrace.stages import StructuredOutputs
from millrace.stages.engine.engine import Engine
from millrace.stages.messages import Started
from millrace.stages.outputs import RequestOutput
from millrace.stages.params import SamplingParams
from millrace.stages.sample.logits_processor import LogitsProcessor
from tests.counts import FULL
from tests.model.checkpoints import make_checkpoint
from tests.stages.late_engines import SMALL, Ask, both, greedy, late, prompts, run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint("qwen3", path)
    return path


def among_plain(*special: SamplingParams, num_tokens: int = 14) -> list[Ask]:
    """Each of these params, and a plain request behind each."""
    each = [one for params in special for one in (params, greedy(num_tokens))]
    return list(zip(prompts(len(each), 40, seed=4), each, strict=True))


def test_penalties_bias_and_least_lengths_are_the_devices_own_business(checkpoint: Path) -> None:
    asks = among_plain(
        greedy(16, repetition_penalty=1.4, frequency_penalty=0.3),
        greedy(16, presence_penalty=1.5),
        greedy(16, logit_bias={7: 30.0, 9: -3.0}),
        SamplingParams(max_tokens=16, temperature=0.0, min_tokens=9, logit_bias={1: 2.0}),
    )
    right, ran = both(checkpoint, asks, late())
    assert ran.answers == right.answers and ran.num_attended == 0
    assert len({tuple(answer[0][0]) for answer in ran.answers}) == len(asks)


@pytest.mark.parametrize("mode", ["processed_logprobs", *["raw_logprobs"] * FULL])
def test_log_probabilities_come_with_the_tokens_and_no_step_waits(checkpoint: Path, mode: str) -> None:
    asks = among_plain(greedy(9, logprobs=5), greedy(9, logprobs=0, presence_penalty=1.0), greedy(9, logprobs=20))
    right, ran = both(checkpoint, asks, late(), logprobs_mode=mode)
    assert ran.answers == right.answers and ran.num_attended == 0
    for ours, theirs in zip(ran.outputs, right.outputs, strict=True):
        _same_logprobs(ours, theirs)
    assert [len(output.outputs[0].logprobs or ()) for output in ran.outputs] == [9, 0, 9, 0, 9, 0]


def _same_logprobs(ours: RequestOutput, theirs: RequestOutput) -> None:
    for this, that in zip(ours.outputs[0].logprobs or (), theirs.outputs[0].logprobs or (), strict=True):
        assert (this.token_id, this.rank) == (that.token_id, that.rank)
        assert this.logprob == pytest.approx(that.logprob, abs=1e-5)
        assert [top[0] for top in this.top] == [top[0] for top in that.top]
        assert [top[3] for top in this.top] == pytest.approx([top[3] for top in that.top], abs=1e-5)


def test_scored_prompts_wait_and_share_steps_with_guided_rows(checkpoint: Path) -> None:
    digits = StructuredOutputs(regex="[0-9]{4}(-[0-9]{2})?")
    asks = among_plain(
        SamplingParams(max_tokens=30, temperature=0.0, structured_outputs=digits),
        greedy(12, allowed_token_ids=tuple(range(20, 40))),
        greedy(12, bad_words=("e", "a")),
        greedy(6, prompt_logprobs=3),
        num_tokens=40,
    )
    right, ran = both(checkpoint, asks, late(), steps_in_flight=2)
    assert ran.answers == right.answers
    assert 0 < ran.num_attended == ran.num_eager < ran.num_steps
    assert re.fullmatch("[0-9]{4}(-[0-9]{2})?", ran.answers[0][0][1])
    assert all(20 <= token_id < 40 for token_id in ran.answers[2][0][0])
    ours, theirs = ran.outputs[6].prompt_logprobs, right.outputs[6].prompt_logprobs
    assert ours is not None and theirs is not None
    assert ours.ranks.tolist() == theirs.ranks.tolist()
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


def test_drafts_change_no_answer(checkpoint: Path) -> None:
    asks = [([5, 6, 7, 8, 9] * 6, greedy(70)), ([11, 12] * 12, greedy(60))]
    settings = {"speculation": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    right, ran = both(checkpoint, asks, late(), **settings)
    assert ran.answers == right.answers
    assert ran.num_attended == 0 == ran.num_eager


class NeverTwice(LogitsProcessor):
    """A logits processor that forbids a token to follow itself, where requested."""

    def __init__(self) -> None:
        self.newest: dict[int, int] = {}

    def start(self, started: Started) -> bool:
        self.newest[started.slot] = int(started.token_ids[-1])
        return bool(started.params.extra_args.get("never_twice"))

    def process(self, slots: Any, logits: Any) -> None:
        logits[range(len(slots)), [self.newest[slot] for slot in slots.tolist()]] = float("-inf")

    def note(self, slots: Any, token_ids: Any) -> None:
        self.newest.update(zip(slots.tolist(), token_ids.tolist(), strict=True))


def test_a_users_processor_sees_the_tokens_it_asked_for_in_order(checkpoint: Path) -> None:
    asks = among_plain(greedy(20, extra_args={"never_twice": True}), greedy(20, extra_args={"never_twice": True}))
    right = asyncio.run(run(checkpoint, asks, None, logits_processor=NeverTwice()))
    ran = asyncio.run(run(checkpoint, asks, late(3), logits_processor=NeverTwice()))
    assert ran.answers == right.answers and ran.num_attended > 0 and ran.num_eager == 0
    for ids in (ran.answers[0][0][0], ran.answers[2][0][0]):
        assert all(this != that for this, that in zip(ids, ids[1:], strict=False))


@pytest.mark.parametrize("width", [12, *[3] * FULL])  # the first needs more candidates than the device returns
def test_a_beam_search_among_answers_finds_what_it_would_find(checkpoint: Path, width: int) -> None:
    async def ask(streams: Any) -> list[list[int]]:
        env = LiveEnv(0)
        env.streams = streams
        try:
            async with Engine(model=str(checkpoint), env=env, **SMALL | {"max_num_seqs": 16}) as engine:
                search = asyncio.ensure_future(engine.beam_search([5, 6, 7], width=width, max_tokens=5))
                (plain,) = [o async for o in engine.generate([8, 9], greedy(15), output_kind="final")]
                return [choice.token_ids for choice in (*(await search).outputs, *plain.outputs)]
        finally:
            await env.aclose()

    assert asyncio.run(ask(late())) == asyncio.run(ask(None))


def test_embeddings_and_answers_are_made_in_the_same_steps(checkpoint: Path) -> None:
    async def ask(streams: Any) -> tuple[list[Any], list[list[int]]]:
        env = LiveEnv(0)
        env.streams = streams
        try:
            async with Engine(model=str(checkpoint), env=env, **SMALL) as engine:

                async def answer(prompt: list[int]) -> list[int]:
                    (output,) = [o async for o in engine.generate(prompt, greedy(20), output_kind="final")]
                    return output.outputs[0].token_ids

                texts = prompts(4, 70, seed=1)
                embeddings = asyncio.gather(*(engine.embed(text) for text in texts))
                answers = await asyncio.gather(*(answer(prompt) for prompt in prompts(4, 30)))
                return [one.embedding for one in await embeddings], answers
        finally:
            await env.aclose()

    (vectors, answers), (right, theirs) = asyncio.run(ask(late())), asyncio.run(ask(None))
    assert answers == theirs
    for ours, wanted in zip(vectors, right, strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-5)
