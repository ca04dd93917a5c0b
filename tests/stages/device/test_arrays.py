"""Steps without torch: numpy arrays give the same tokens as tensors of the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from millrace.stages.device.arrays import HOST, arrays_of
from millrace.stages.device.pooler import Pooler
from millrace.stages.device.scored_prompts import LogitsWithPrompts, ScoredChunk
from millrace.stages.messages import StepTokens
from millrace.stages.pooling_params import PoolingParams
from millrace.stages.sample import sampling_math
from millrace.stages.sample.logit_tiles import LogitTiles
from millrace.stages.sample.logits_processor import LogitsProcessor
from millrace.stages.sample.sampler import Sampler
from millrace.stages.sample.sampling_math import DrawParams
from tests.counts import count
from tests.kernels.draw_rows import draw_rows
from tests.stages.grants import decode, grant, started

VOCABS = [1, 2, 127, 128, 129, 1_000, 8_193]
Kinds = tuple[np.ndarray, torch.Tensor]


def both(rng: np.random.Generator, num_rows: int, vocab: int, spread: float = 3.0) -> Kinds:
    """Rows of the same logits of each kind, in memory of their own; some numbers tie."""
    rows = (rng.standard_normal((num_rows, vocab)) * spread).astype(np.float32)
    rows[:, rng.integers(0, vocab, vocab // 4)] = 1.5
    return rows, torch.from_numpy(rows.copy())


def how(rng: np.random.Generator, num_rows: int) -> DrawParams:
    """A row each, of every mixture of truncations."""
    draws = draw_rows(
        num_rows,
        temperature=rng.choice([0.3, 1.0, 1.7], num_rows),
        top_k=rng.choice([0, 1, 7, 50], num_rows),
        top_p=rng.choice([1.0, 0.05, 0.6, 0.95], num_rows),
        min_p=rng.choice([0.0, 0.02, 0.5], num_rows),
        top_n_sigma=rng.choice([0.0, 0.0, 1.3], num_rows),
        typical_p=rng.choice([1.0, 1.0, 0.4], num_rows),
    )
    return DrawParams(draws, u=rng.random(num_rows))


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_likeliest_token_its_number_and_the_maxima_of_blocks_are_the_same(vocab: int):
    ours, theirs = (LogitTiles(x) for x in both(np.random.default_rng(vocab), 7, vocab))
    for mine, other in zip(ours.likeliest(), theirs.likeliest(), strict=True):
        np.testing.assert_array_equal(mine, other)
    np.testing.assert_array_equal(ours.maxima, theirs.maxima)
    np.testing.assert_allclose(ours.sums(), theirs.sums(), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("vocab", VOCABS)
def test_a_number_draws_the_same_token_and_truncation_leaves_the_same_set(vocab: int):
    rng = np.random.default_rng(vocab)
    for _ in range(count(in_ci=4, full=100)):
        ours, theirs = both(rng, 24, vocab)
        drawing = how(rng, 24)
        best = ours.max(1).astype(np.float64)
        np.testing.assert_array_equal(
            sampling_math.draw(ours, best, drawing), sampling_math.draw(theirs, best, drawing)
        )
        maxima = LogitTiles(ours).maxima
        drawn = (sampling_math.draw_truncated(x, maxima, drawing) for x in (ours, theirs))
        np.testing.assert_array_equal(*drawn)
        over = drawing.temperature[:, None].astype(np.float32)
        kept = [sampling_math.truncated(x, drawing) for x in (ours / over, theirs / torch.from_numpy(over))]
        np.testing.assert_array_equal(np.isneginf(kept[0]), kept[1].isneginf())
        assert (kept[0] > -np.inf).any(1).all()


@pytest.mark.parametrize("vocab", VOCABS)
def test_logprobs_ranks_and_the_likeliest_few_are_the_same(vocab: int):
    rng = np.random.default_rng(vocab)
    ours, theirs = both(rng, 9, vocab, spread=10.0)
    ours += rng.standard_normal(ours.shape, np.float32)  # nothing ties: torch may name equals in any order
    theirs.copy_(torch.from_numpy(ours))
    token_ids = rng.integers(0, vocab, 9)
    mine, other = (sampling_math.score(x, token_ids, min(20, vocab)) for x in (ours, theirs))
    expected = torch.log_softmax(theirs.double(), 1)
    np.testing.assert_allclose(mine.logprobs, expected[torch.arange(9), torch.from_numpy(token_ids)], atol=1e-5)
    np.testing.assert_array_equal(mine.ranks, other.ranks)
    np.testing.assert_array_equal(mine.top_ids, other.top_ids)
    np.testing.assert_allclose(mine.top_logprobs, expected.topk(min(20, vocab)).values, atol=1e-5)
    np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-5)
    assert sampling_math.score(ours, token_ids, 0).top_ids.shape == (9, 0)


def test_among_equals_the_likeliest_few_begin_with_the_lowest_id():
    ids, values = HOST.likeliest(np.array([[1.0, 3.0, 3.0, 0.0, 3.0]], np.float32), 4)
    assert ids.tolist() == [[1, 2, 4, 0]] and values.tolist() == [[3.0, 3.0, 3.0, 1.0]]


def test_a_row_of_numpy_is_drawn_from_alone_as_in_a_batch():
    rng = np.random.default_rng(3)
    ours, _ = both(rng, 33, 1_000)
    drawing, maxima = how(rng, 33), LogitTiles(ours).maxima
    best = maxima.max(1).astype(np.float64)
    drawn, cut = sampling_math.draw(ours, best, drawing), sampling_math.draw_truncated(ours, maxima, drawing)
    for row in range(33):
        only = slice(row, row + 1)
        assert sampling_math.draw(ours[only], best[only], drawing[only]) == drawn[only]
        assert sampling_math.draw_truncated(ours[only].copy(), maxima[only], drawing[only]) == cut[only]


# -- the sampler


def samplers(num_slots: int, vocab: int, **settings: Any) -> tuple[Sampler, Sampler]:
    numbers = np.zeros(num_slots, np.int64)
    last_tokens = (numbers, torch.from_numpy(numbers.copy()))
    ours, theirs = (Sampler(last, vocab, 64, (vocab - 1,), **settings) for last in last_tokens)
    return ours, theirs


def any_params(rng: np.random.Generator, vocab: int) -> dict[str, Any]:
    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    return {
        "temperature": one_of(0.0, 0.7, 1.0, 1.5),
        "top_k": one_of(0, 5),
        "top_p": one_of(1.0, 0.8),
        "min_p": one_of(0.0, 0.1),
        "top_n_sigma": one_of(0.0, 0.0, 2.0),
        "typical_p": one_of(1.0, 1.0, 0.7),
        "repetition_penalty": one_of(1.0, 1.3),
        "frequency_penalty": one_of(0.0, 0.4),
        "presence_penalty": one_of(0.0, -0.6),
        "logit_bias": one_of({}, {3: 4.0, vocab - 2: -100.0}),
        "min_tokens": one_of(0, 3),
        "logprobs": one_of(None, 0, 4),
        "allowed_token_ids": one_of(None, None, (1, 5, vocab - 1)),
    }


def same(ours: StepTokens, theirs: StepTokens) -> None:
    for name in ("slots", "sequence_ids", "places", "token_ids", "finishes"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        assert getattr(ours, name).dtype == getattr(theirs, name).dtype
    assert ours.logprobs.keys() == theirs.logprobs.keys()
    for row, mine in ours.logprobs.items():
        other = theirs.logprobs[row]
        num_finite = np.count_nonzero(np.isfinite(mine.logprobs))  # what truncation left nothing of ties
        assert (mine.rank, mine.token_ids[:num_finite]) == (other.rank, other.token_ids[:num_finite])
        np.testing.assert_allclose((mine.chosen, *mine.logprobs), (other.chosen, *other.logprobs), atol=1e-5)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_samplers_of_both_kinds_choose_the_same_tokens_whatever_is_asked(mode: Any):
    vocab, num_slots = 300, 16
    for seed in range(count(in_ci=6, full=200)):
        rng = np.random.default_rng(seed)
        ours, theirs = samplers(num_slots, vocab, logprobs_mode=mode)
        prompts = [rng.integers(0, vocab, rng.integers(1, 9)).tolist() for _ in range(num_slots)]
        news = [started(i, p, seed=i, **any_params(rng, vocab)) for i, p in enumerate(prompts)]
        for step in range(6):
            slots = list(range(num_slots)) if step == 0 else sorted(rng.permutation(num_slots)[:9].tolist())
            numbers = (rng.standard_normal((len(slots), vocab)) * 3).astype(np.float32)
            if step == 3:
                numbers[0] = np.nan
            this = decode(*slots, step=step, started=news if step == 0 else ())
            same(ours.sample(this, numbers.copy()), theirs.sample(this, torch.from_numpy(numbers)))
            np.testing.assert_array_equal(ours.last_tokens, theirs.last_tokens)


class Favourite(LogitsProcessor):
    """Forces token 7 in the rows that request it, with tensor operations."""

    def start(self, started: Any) -> bool:
        return bool(started.params.extra_args.get("favourite"))

    def process(self, slots: Sequence[int], logits: Any) -> None:
        logits.index_fill_(1, torch.tensor([7]), 1_000.0)


@pytest.mark.parametrize("wanted", [(True, True), (False, True)])
def test_processors_of_users_get_tensors_and_what_they_change_counts(wanted: tuple[bool, bool]):
    ours, _ = samplers(2, 40)
    ours.use(Favourite())
    news = [started(slot, extra_args={"favourite": wants}) for slot, wants in enumerate(wanted)]
    logits = np.zeros((2, 40), np.float32)
    logits[:, 5] = 1.0
    tokens = ours.sample(decode(0, 1, started=news), logits)
    assert tokens.token_ids.tolist() == [7 if wants else 5 for wants in wanted]


# -- prompts that are scored, and pooled sequences


def test_prompts_are_scored_alike_in_pieces():
    rng = np.random.default_rng(0)
    hidden, head = rng.standard_normal((12, 8)).astype(np.float32), rng.standard_normal((8, 50)).astype(np.float32)
    runs = tuple(ScoredChunk(9, 1, rng.integers(0, 50, n).astype(np.int32), 0, 3) for n in (5, 7))
    told = []
    for kind in (lambda x: x, torch.from_numpy):
        matrix = kind(head)
        logits = LogitsWithPrompts(
            kind(np.zeros((0, 50), np.float32)), runs, kind(hidden), lambda x, m=matrix: x @ m, 4
        )
        ours, theirs = samplers(2, 50)
        sampler = ours if isinstance(matrix, np.ndarray) else theirs
        told.append(sampler.sample(grant([(0, 0, 2, False)], started=[started(0)]), logits).prompt_logprobs)
    for mine, other in zip(*told, strict=True):
        np.testing.assert_array_equal(mine.ranks, other.ranks)
        np.testing.assert_array_equal(mine.top_ids, other.top_ids)
        np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-5)
        np.testing.assert_allclose(mine.top_logprobs, other.top_logprobs, atol=1e-5)


def test_pooled_sums_are_those_of_all_tokens_of_a_slot():
    rng = np.random.default_rng(0)
    hidden, slots = rng.standard_normal((9, 5)).astype(np.float32), np.array([2, 2, 2, 0, 1, 1, 1, 1, 2])
    for kind in (lambda x: x, torch.from_numpy):
        pooler = Pooler(kind(np.zeros((3, 5), np.float32)))
        for slot in range(3):
            pooling = PoolingParams(kind="mean", normalize=False)
            pooler.start(replace(started(slot, (1,)), pooling=pooling))
        pooler.add(slots, kind(hidden))
        pooler.add(slots[:0], kind(hidden[:0]))
        vectors = pooler.take(np.arange(3))
        for slot in range(3):
            np.testing.assert_allclose(vectors[slot].vector, hidden[slots == slot].sum(0), rtol=1e-5, atol=1e-5)
        assert pooler.num_pooled == 0


def test_numpy_is_asked_for_numpy_and_torch_for_tensors():
    assert arrays_of(np.zeros(1)) is HOST
    assert type(arrays_of(torch.zeros(1))).__name__ == "TorchArrays"
