"""The sampling mathematics against transformers' processors, plain sorts and the chi-square law."""

import math

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from millrace.stages.sample import logit_edits, sampling_math
from millrace.stages.sample.logit_tiles import LogitTiles
from millrace.stages.sample.sampling_math import DrawParams
from tests.kernels.draw_rows import draw_rows, kept_weights

VOCABS = [1, 2, 100, 127, 128, 129, 8193]


def rows(num_rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def drawing(u, **how) -> DrawParams:
    u = np.asarray(u, np.float64)
    return DrawParams(draw_rows(len(u), **how), u)


def drawn(logits: torch.Tensor, how: DrawParams) -> np.ndarray:
    maxima = LogitTiles(logits).maxima
    if how.is_truncated.any():
        return sampling_math.draw_truncated(logits, maxima, how)
    return sampling_math.draw(logits, maxima.max(1).astype(float), how)


def support(row: torch.Tensor, num_draws: int = 512, **how: float) -> set[int]:
    """Every token that some u draws. u is spread evenly, so that no token of more than 1 in 512 is missed."""
    u = (np.arange(num_draws) + 0.5) / num_draws
    return set(drawn(row.expand(num_draws, -1), drawing(u, **how)).tolist())


def by_transformers(
    row: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, top_n_sigma=0.0, typical_p=1.0
) -> torch.Tensor:
    """The row's probabilities after transformers' warpers, in its own order, and top_n_sigma by its definition."""
    scores, ids = row[None].clone(), torch.zeros(1, 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(temperature)(ids, scores)
    scores = TopKLogitsWarper(top_k)(ids, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(ids, scores) if top_p < 1 else scores
    scores = MinPLogitsWarper(min_p)(ids, scores) if min_p else scores
    if top_n_sigma > 0:
        scores[:, torch.from_numpy(kept_weights(row.numpy(), top_n_sigma=top_n_sigma) == 0)] = -torch.inf
    scores = TypicalLogitsWarper(typical_p)(ids, scores) if typical_p < 1 else scores
    return scores.softmax(-1)[0]


# -- the likeliest token


@pytest.mark.parametrize("vocab", [*VOCABS, 151_936])
def test_the_likeliest_token_is_torchs_argmax(vocab):
    logits = rows(3, vocab)
    blocks = LogitTiles(logits)
    assert blocks.likeliest()[0].tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("vocab", VOCABS)
def test_among_equals_the_lowest_id_is_the_likeliest(vocab):
    logits = torch.zeros(4, vocab)
    ties = [0, vocab // 2, vocab - 1, vocab // 3]
    for row, first in enumerate(ties):
        logits[row, [first, vocab - 1]] = 1.0
    blocks = LogitTiles(logits)
    assert blocks.likeliest()[0].tolist() == ties


# -- truncation


CASES = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"top_p": 0.05},
    {"top_p": 0.6},
    {"top_p": 0.97},
    {"min_p": 0.03},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.2},
    {"top_k": 12, "min_p": 0.05},
    {"top_p": 0.9, "min_p": 0.02},
    {"top_p": 0.8, "temperature": 2.0},
    {"min_p": 0.1, "top_k": 5, "temperature": 0.3},
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 2.5, "temperature": 3.0},
    {"top_n_sigma": 1.5, "top_p": 0.9, "top_k": 40},
    {"typical_p": 0.2},
    {"typical_p": 0.9, "temperature": 2.0},
    {"typical_p": 0.5, "top_k": 20},
    {"typical_p": 0.6, "top_p": 0.8, "min_p": 0.01, "top_n_sigma": 3.0},
]


@pytest.mark.parametrize("how", CASES, ids=str)
@pytest.mark.parametrize("vocab", [100, 129, 300])
def test_what_is_kept_is_what_transformers_keeps(how, vocab):
    for seed in range(2):
        row = rows(1, vocab, seed)[0]
        expected = by_transformers(row, **how)
        kept = support(row, **how)
        assert kept <= set(expected.nonzero()[:, 0].tolist())
        assert kept >= set((expected > 1 / 512).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("how", [*CASES, {}, {"temperature": 0.7}], ids=str)
def test_each_token_gets_its_share_of_the_unit_interval(how):
    row = rows(1, 300, 5)[0]
    num_draws = 2048
    u = (np.arange(num_draws) + 0.5) / num_draws
    tokens = drawn(row.expand(num_draws, -1), drawing(u, **how))
    share = np.bincount(tokens, minlength=300) / num_draws
    np.testing.assert_allclose(share, by_transformers(row, **how).double().numpy(), atol=2 / num_draws)
    assert (np.diff(tokens) >= 0).all()  # in the order of the vocabulary


@pytest.mark.parametrize("is_numpy", [False, True])
def test_top_n_sigma_leaves_hidden_tokens_out_of_its_deviation(is_numpy):
    row = rows(1, 300, 3)[0]
    row[::2] = -torch.inf
    row[1] = -50.0
    logits = row.numpy()[None].repeat(512, 0) if is_numpy else row.expand(512, -1)
    u = (np.arange(512) + 0.5) / 512
    for n in (0.2, 1.0, 3.0):
        weights = kept_weights(row.numpy(), temperature=9.0, top_n_sigma=n)
        assert set(drawn(logits, drawing(u, temperature=9.0, top_n_sigma=n)).tolist()) == set(weights.nonzero()[0])


def test_tokens_that_tie_with_the_last_one_kept_are_kept_too():
    row = torch.tensor([0.0, 2.0, 1.0, 1.0, 1.0, -3.0])
    assert support(row, top_k=2) == {1, 2, 3, 4}
    assert support(row, top_p=0.5) == {1, 2, 3, 4}


def test_a_flat_distribution_keeps_what_top_p_needs_though_no_token_stands_out():
    row = rows(1, 20_000, spread=0.01)[0]
    expected = by_transformers(row, top_p=0.5).double().cumsum(0).numpy()
    u = np.linspace(0.001, 0.999, 40)
    tokens = drawn(row.expand(40, -1), drawing(u, top_p=0.5))
    assert (expected[tokens] > u - 1e-4).all() and (expected[tokens - 1] < u + 1e-4).all()


def test_a_first_try_that_is_short_of_mass_is_made_good():
    """More tokens than a first try looks at are needed, with a clear order among them."""
    row = torch.linspace(0.0, -3.0, 4000)
    last_kept = int(by_transformers(row, top_p=0.9).nonzero().max())
    assert drawn(row[None], drawing([1 - 2**-53], top_p=0.9)).tolist() == [last_kept]


@pytest.mark.parametrize("how", CASES, ids=str)
def test_candidates_alone_and_whole_rows_draw_the_same(how, monkeypatch):
    logits = rows(40, 5000, 8, spread=2.0)
    how = drawing(np.random.default_rng(0).random(40), **how)
    monkeypatch.setattr(sampling_math, "WHOLE_SIZE", 3 * 5000)
    maxima = LogitTiles(logits).maxima
    best = maxima.max(1).astype(float)
    mass = LogitTiles(sampling_math._weights(logits, best, how.temperature)).sums().cumsum(1)[:, -1]
    floor = sampling_math._floor(how, logits, how.temperature)
    whole = sampling_math._draw_whole(logits, best, how, sampling_math.RowTotals(mass, floor))
    assert sampling_math.draw_truncated(logits, maxima, how).tolist() == whole.tolist()


def test_masked_tokens_are_never_drawn():
    row = rows(1, 300, 2)[0]
    row[::3] = -torch.inf
    for how in ({}, {"top_k": 250}, {"top_p": 0.999}, {"min_p": 1e-9}):
        assert not {token for token in support(row, **how) if token % 3 == 0}


@pytest.mark.parametrize("how", [{}, {"top_k": 50}, {"top_p": 0.999999}, {"min_p": 1e-12}], ids=str)
@pytest.mark.parametrize("vocab", [1, 100, 8193, 151_936])
def test_ids_stay_within_the_vocabulary_at_both_ends_of_the_unit_interval(vocab, how):
    logits = rows(2, vocab)
    logits[:, -1] += 20.0  # the last token, in the last and shorter block
    tokens = drawn(logits, drawing([0.0, 1 - 2**-53], **how))
    assert ((tokens >= 0) & (tokens < vocab)).all()
    assert tokens[1] == vocab - 1


def test_a_tiny_temperature_draws_the_likeliest():
    logits = rows(5, 200)
    u = np.linspace(0, 0.999, 5)
    for how in ({}, {"top_p": 0.9}):
        assert drawn(logits, drawing(u, temperature=1e-20, **how)).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_draws_the_same_alone_and_among_others_to_the_last_bit(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits = rows(33, 5000, 9)
        rng = np.random.default_rng(3)
        cuts = {"top_k": rng.choice([0, 40], 33), "top_p": rng.choice([1, 0.9], 33)}
        how = drawing(rng.random(33), temperature=rng.uniform(0.2, 2, 33), **cuts)
        together = sampling_math.draw_truncated(logits, LogitTiles(logits).maxima, how)
        open_sums = LogitTiles(
            sampling_math._weights(logits, LogitTiles(logits).maxima.max(1).astype(float), how.temperature)
        ).sums()
        for i in range(33):
            alone = logits[i : i + 1].clone()
            maxima = LogitTiles(alone).maxima
            assert sampling_math.draw_truncated(alone, maxima, how[np.array([i])])[0] == together[i]
            weights = sampling_math._weights(alone, maxima.max(1).astype(float), how.temperature[i : i + 1])
            assert (LogitTiles(weights).sums()[0] == open_sums[i]).all()
    finally:
        torch.set_num_threads(before)


# -- penalties


def test_repetition_penalty_is_transformers():
    logits, ids = rows(3, 50), torch.tensor([[1, 4, 4, 9], [0, 0, 0, 0], [49, 2, 3, 2]])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone())
    logit_edits.penalise_repetition(logits, torch.arange(3)[:, None], ids, torch.full((3, 1), 1.3))
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)


def test_frequency_counts_and_presence_does_not():
    logits = torch.zeros(1, 6)
    row, ids = torch.zeros(1, 1, dtype=torch.long), torch.tensor([[2, 2, 2, 5]])
    logit_edits.penalise_frequency(logits, row, ids, torch.tensor([[0.5, 0.5, 0.5, 0.0]]))
    logit_edits.penalise_presence(logits, row, ids, torch.tensor([[0.25]]))
    assert logits.tolist() == [[0, 0, -1.75, 0, 0, -0.25]]


# -- randomness


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """The chance of a deviation at least this large, by Wilson and Hilferty's cube-root approximation."""
    degrees = len(expected) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.mark.parametrize("varies", ["position", "seed", "both"])
def test_uniform_numbers_are_uniform_along_positions_and_along_seeds(varies):
    n = 50_000
    index = np.arange(n)
    seeds = index.astype(np.uint64) if varies != "position" else np.full(n, 7, np.uint64)
    positions = index if varies != "seed" else np.full(n, 11)
    u = sampling_math.uniform(seeds, positions)
    assert ((u >= 0) & (u < 1)).all() and len(np.unique(u)) == n
    cells = np.bincount((u[:-1] * 16).astype(int) * 16 + (u[1:] * 16).astype(int), minlength=256)  # pairs of neighbours
    assert 1e-4 < chi_square(cells, np.full(256, (n - 1) / 256)) < 1 - 1e-4


def splitmix64(state: int, index: int) -> int:
    """The `index`-th output of SplitMix64 from `state`, as its authors give it, in whole numbers."""
    z = (state + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    return finish(z)


def finish(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_the_noise_is_splitmix64_for_ever_as_seeded_answers_depend_on_it():
    pairs = [(0, 0), (1, 5), (2**64 - 1, 10**6), (12345, 2**31 - 1)]
    u = sampling_math.uniform(
        np.array([seed for seed, _ in pairs], np.uint64), np.array([position for _, position in pairs])
    )
    assert u.tolist() == [(splitmix64(finish(seed), position) >> 11) / 2**53 for seed, position in pairs]
    assert u[0] == 0.8833108082136426


@pytest.mark.parametrize("how", [{}, {"temperature": 1.7}, {"top_p": 0.8}, {"top_k": 9}, {"min_p": 0.05}], ids=str)
def test_frequencies_follow_the_distribution(how):
    row = rows(1, 200, 4, spread=1.5)[0]
    n = 6000
    u = sampling_math.uniform(np.full(n, 42, np.uint64), np.arange(n))
    counts = np.bincount(drawn(row.expand(n, -1), drawing(u, **how)), minlength=200)
    expected = by_transformers(row, **how).double().numpy() * n
    is_common = expected >= 5
    assert counts[expected == 0].sum() == 0
    rest = counts[~is_common].sum(), expected[~is_common].sum()
    observed = np.append(counts[is_common], rest[0]) if rest[1] > 5 else counts[is_common]
    predicted = np.append(expected[is_common], rest[1]) if rest[1] > 5 else expected[is_common]
    assert chi_square(observed, predicted) > 1e-3


# -- log-probabilities


def test_logprobs_are_the_log_softmax_of_what_the_model_said():
    logits = rows(3, 60)
    expected = logits.log_softmax(-1)
    found = sampling_math.top_logprobs(logits, np.array([3, 59, int(logits[2].argmax())]), np.array([5, 0, 20]))
    for row, token in enumerate([3, 59, int(logits[2].argmax())]):
        assert found[row].chosen == pytest.approx(float(expected[row, token]), abs=1e-6)
        assert found[row].rank == 1 + int((expected[row] > expected[row, token]).sum())
    top = expected[0].topk(5)
    assert found[0].token_ids == tuple(top.indices.tolist())
    assert found[0].logprobs == pytest.approx(tuple(top.values.tolist()), abs=1e-6)
    assert found[1].token_ids == () and found[1].logprobs == ()
    assert len(found[2].token_ids) == 20 and found[2].rank == 1
