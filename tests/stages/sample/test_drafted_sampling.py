"""The sampler with drafts: its tokens are those it would choose one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from millrace.stages.messages import Drafts, FinishReason, StepGrant, StepTokens
from millrace.stages.sample.sampler import Sampler
from tests.stages.grants import grant, ints, started

V = 40
EOS = 39


@pytest.fixture(params=["numpy", "torch"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return make(request.param)


def make(kind: str) -> Sampler:
    last_tokens = np.zeros(4, np.int64)
    return Sampler(torch.from_numpy(last_tokens) if kind == "torch" else last_tokens, V, 64, [EOS])


def rows(sampler: Sampler, logits: np.ndarray) -> Any:
    """An array of the sampler's kind."""
    made = logits.astype(np.float32)
    return torch.from_numpy(made) if isinstance(sampler.last_tokens, torch.Tensor) else made


def peaks(*token_ids: int) -> np.ndarray:
    """Logits with one row a token, which is the likeliest there."""
    return 5.0 * np.eye(V)[list(token_ids)]


def drafted(*drafts: list[int], news: Any = ()) -> StepGrant:
    """Slot i, whose newest token is at position 8, with the i-th drafts."""
    counts = [len(each) for each in drafts]
    made = grant([(slot, 8, 1 + count, True) for slot, count in enumerate(counts)], started=news)
    flat = np.array([token for each in drafts for token in each], np.intp)
    return replace(made, drafts=Drafts(ints(*counts), flat))


def said(tokens: StepTokens) -> list[tuple[int, int, int, int]]:
    """(slot, place, token, finish) of each row."""
    columns = (tokens.slots, tokens.places, tokens.token_ids, tokens.finishes)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_tokens_count_as_long_as_they_are_the_drafts_and_the_last_is_the_newest(sampler: Sampler):
    news = [started(0, answer=(9,)), started(1)]
    tokens = sampler.sample(drafted([5, 6, 7], [], news=news), rows(sampler, peaks(5, 6, 1, 8, 4)))
    assert said(tokens) == [(0, 1, 5, 0), (0, 2, 6, 0), (0, 3, 1, 0), (1, 0, 4, 0)]
    assert np.asarray(sampler.last_tokens).tolist() == [1, 4, 0, 0]
    after = sampler.sample(grant([(0, 11, 1, True), (1, 4, 1, True)]), rows(sampler, peaks(2, 3)))
    assert said(after) == [(0, 4, 2, 0), (1, 1, 3, 0)]


def test_an_answer_ends_at_the_first_token_that_ends_it(sampler: Sampler):
    news = [started(0), started(1, stop_token_ids=(6,)), started(2, max_tokens=2), started(3, ignore_eos=True)]
    drafts = ([5, EOS, 7], [6, 6], [1, 2, 3], [EOS])
    chosen = (5, EOS, 7, 8, 6, 6, 6, 1, 2, 3, 4, EOS, 1)
    tokens = sampler.sample(drafted(*drafts, news=news), rows(sampler, peaks(*chosen)))
    stop, length = int(FinishReason.STOP), int(FinishReason.LENGTH)
    assert said(tokens) == [
        *((0, 0, 5, 0), (0, 1, EOS, stop)),
        (1, 0, 6, stop),
        *((2, 0, 1, 0), (2, 1, 2, length)),
        *((3, 0, EOS, 0), (3, 1, 1, 0)),
    ]
    late = sampler.sample(grant([(slot, 9, 1, True) for slot in range(4)]), rows(sampler, peaks(1, 1, 1, 1)))
    assert late.slots.tolist() == [3]


def test_a_row_that_holds_no_number_ends_its_run(sampler: Sampler):
    logits = peaks(5, 6, 7)
    logits[1, 3] = np.nan
    tokens = sampler.sample(drafted([5, 0], news=[started(0)]), rows(sampler, logits))
    assert said(tokens) == [(0, 0, 5, 0), (0, 1, 0, int(FinishReason.ERROR))]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.7}, {"top_k": 5, "min_p": 0.05}])
def test_drawn_tokens_are_those_that_would_be_drawn_one_by_one(kind: str, truncation: dict[str, Any]):
    """For any drafts: the tokens of a first run, changed from some place on, are the drafts of a second one."""
    params: dict[str, Any] = {"temperature": 1.5, "seed": 11, "logprobs": 2, **truncation}
    logits = np.random.default_rng(3).normal(size=(6, V)) * 3
    single = make(kind)
    single.sample(grant([(0, 0, 3, False)], started=[started(0, ignore_eos=True, **params)]), rows(single, logits[:0]))
    steps = [single.sample(grant([(0, 3 + i, 1, True)]), rows(single, logits[i : i + 1])) for i in range(6)]
    right = [int(step.token_ids[0]) for step in steps]
    for num_right in range(6):
        drafts = [*right[:num_right], *((token + 1) % V for token in right[num_right:5])]
        sampler = make(kind)
        news = [started(0, ignore_eos=True, **params)]
        tokens = sampler.sample(drafted(drafts, news=news), rows(sampler, logits))
        assert tokens.token_ids.tolist() == right[: num_right + 1]
        assert tokens.places.tolist() == list(range(num_right + 1))
        told = [(each.chosen, each.token_ids, each.logprobs) for each in tokens.logprobs.values()]
        singles = [step.logprobs[0] for step in steps[: num_right + 1]]
        assert told == [(each.chosen, each.token_ids, each.logprobs) for each in singles]


def test_rows_beside_it_get_their_edits_and_log_probabilities(sampler: Sampler):
    news = [started(0), started(1, logit_bias={7: 100.0}, logprobs=1), started(2, presence_penalty=2.0, answer=(3,))]
    logits = peaks(5, 1, 6, 2, 3)
    logits[4, 8] = 4.0
    tokens = sampler.sample(drafted([5, 6], [], [], news=news), rows(sampler, logits))
    assert said(tokens) == [(0, 0, 5, 0), (0, 1, 1, 0), (1, 0, 7, 0), (2, 1, 8, 0)]
    assert list(tokens.logprobs) == [2] and tokens.logprobs[2].token_ids == (2,)


def test_an_ended_sequence_loses_all_rows_of_its_run(sampler: Sampler):
    sampler.sample(drafted([], [], news=[started(0, max_tokens=1), started(1)]), rows(sampler, peaks(1, 2)))
    tokens = sampler.sample(drafted([4], [5]), rows(sampler, peaks(4, 4, 5, 6)))
    assert said(tokens) == [(1, 1, 5, 0), (1, 2, 6, 0)]
