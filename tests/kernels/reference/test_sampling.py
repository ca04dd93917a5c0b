"""The twins of the sampling kernels: their noise, and that what is drawn is spread as it should be."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.kernels.layout import sampling_rows
from millrace.kernels.reference import sampling as reference_sampling
from tests.kernels.draw_rows import kept_weights
from tests.kernels.sampling_cases import noise, table

NUM_DRAWS = 100_000 if os.environ.get("MILLRACE_FULL") else 4000
CHI_SQUARE_999 = {9: 27.9, 15: 37.7, 24: 51.2, 81: 126.1}  # 99.9 % of sums lie below, by degrees of freedom


def draw(logits: Tensor, count: int, seed: int = 1, **asked: Any) -> Tensor:
    """[count] tokens of one sequence, at its first positions, all of the same logits [V]."""
    rows, slots = table({"temperature": 1.0, "seed": seed} | asked), torch.zeros(count, dtype=torch.int64)
    arguments = (logits.expand(count, -1), rows, slots, torch.arange(count))
    return (
        reference_sampling.choose_truncated(*arguments)[0]
        if "top_k" in asked
        else reference_sampling.choose(*arguments)
    )


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities.double() / probabilities.double().sum() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_philox_gives_the_published_numbers() -> None:
    # Random123's known answers for philox4x32-10: counter and key of zeros; of all ones only where both halves are.
    zero = torch.zeros(1, dtype=torch.int64)
    numbers = reference_sampling._philox((zero, zero, zero), (zero, zero))
    assert [f"{int(number):08x}" for number in numbers] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


@pytest.mark.parametrize("seed", [1, 2**64 - 1])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_are_spread_as_the_softmax_says(temperature: float, seed: int) -> None:
    logits = noise(1, 300, scale=2.0)[0]  # three groups
    counts = draw(logits, NUM_DRAWS, seed, temperature=temperature).bincount(minlength=300)
    shares, order = (logits.double() / temperature).softmax(0).sort(descending=True)
    ends = [*range(1, 10), 300]  # the nine likeliest and the others
    counts, shares = (torch.stack([part.sum() for part in x.tensor_split(ends[:-1])]) for x in (counts[order], shares))
    assert chi_square(counts, shares) < CHI_SQUARE_999[9]


def test_tokens_are_spread_evenly_over_all_of_a_vocabulary_whose_numbers_are_equal() -> None:
    counts = draw(torch.zeros(8200), 1000).bincount(minlength=8200).view(82, 100).sum(1)
    assert chi_square(counts, torch.ones(82)) < CHI_SQUARE_999[81]


def test_a_token_says_nothing_of_the_next_one() -> None:
    token_ids = draw(torch.zeros(5), NUM_DRAWS)
    counts = (token_ids[:-1] * 5 + token_ids[1:]).bincount(minlength=25)
    assert chi_square(counts, torch.ones(25)) < CHI_SQUARE_999[24]


def test_neighbouring_seeds_draw_apart_from_each_other() -> None:
    rows = table(*({"temperature": 1.0, "seed": seed} for seed in range(1 + NUM_DRAWS)))
    slots = torch.arange(1 + NUM_DRAWS)
    token_ids = reference_sampling.choose(torch.zeros(1 + NUM_DRAWS, 4), rows, slots, slots * 0 + 7)
    counts = (token_ids[:-1] * 4 + token_ids[1:]).bincount(minlength=16)
    assert chi_square(counts, torch.ones(16)) < CHI_SQUARE_999[15]


def test_models_of_one_vocabulary_draw_with_the_same_noise() -> None:
    """So a draft of a similar model is often the target's own choice; by chance, one in 10 would be."""
    logits = noise(1, 1000, scale=2.0)[0]
    draft = torch.nn.functional.pad(logits + 0.1 * noise(1, 1000, seed=1, scale=1.0)[0], (0, 152), value=-1e4)
    shares, other = logits.softmax(0), draft.softmax(0)[:1000]
    distance = float((shares - other).abs().sum()) / 2
    is_equal = (draw(logits, 2000) == draw(draft, 2000)).double().mean()
    assert is_equal > (1 - distance) / (1 + distance) - 0.02 > 0.85 > 8 * float((shares * other).sum())


def test_what_is_cut_is_never_drawn_and_the_rest_keeps_its_proportions() -> None:
    logits = noise(1, 30, scale=1.0)[0]
    counts = draw(logits, NUM_DRAWS, top_k=10).bincount(minlength=30)
    kept = logits.topk(10).indices
    assert counts.sum() == counts[kept].sum()
    assert chi_square(counts[kept], logits[kept].exp()) < CHI_SQUARE_999[9]


def test_the_largest_noise_has_all_its_digits() -> None:
    # The largest of n is below ln(n) + x with a chance of exp(-exp(-x)): it is 1.9 less, or 6.9 more, once in 1,000.
    arguments = (table({"seed": 3}), torch.tensor([0]), torch.tensor([0]), torch.arange(1_000_000)[None])
    found = reference_sampling.gumbel(*arguments, reference_sampling.TOKEN_NOISE)
    assert np.log(1e6) - 1.9 < float(found.max()) < np.log(1e6) + 6.9
    assert found.isfinite().all() and len(found[found > 10].unique()) == int((found > 10).sum()) > 20


def test_a_row_of_the_table_is_64_bytes_and_keeps_what_was_asked_for() -> None:
    row = sampling_rows.pack(temperature=0.7, top_k=-1, seed=-2, presence_penalty=0.25, end_position=9)
    assert row.nbytes == 64 and row[sampling_rows.AT["top_k"]] == 0 and row[sampling_rows.END_POSITION] == 9
    assert row[[sampling_rows.SEED_LOW, sampling_rows.SEED_HIGH]].tolist() == [-2, -1]
    assert row.view(np.float32)[[sampling_rows.TEMPERATURE, sampling_rows.PRESENCE]].tolist() == [np.float32(0.7), 0.25]


def test_counts_tell_prompt_and_answer_apart() -> None:
    counts = sampling_rows.count(np.array([3, 3, 1, 1, 4, 1], np.int32), 3, 6)
    assert (counts & sampling_rows.MAX_COUNT).tolist() == [0, 2, 0, 0, 1, 0]
    assert (counts < 0).tolist() == [False, True, False, True, False, False]


CUTS: tuple[dict[str, Any], ...] = (
    {"top_n_sigma": 0.4},
    {"top_n_sigma": 1.2, "top_p": 0.8, "temperature": 2.0},
    {"typical_p": 0.5},
    {"typical_p": 0.8, "top_k": 30, "temperature": 2.0},
)


@pytest.mark.parametrize("size", [1, 5, 300])
@pytest.mark.parametrize("asked", CUTS, ids=str)
def test_cuts_keep_what_their_definitions_in_float64_do(asked: dict[str, Any], size: int) -> None:
    logits = noise(6, size)
    logits[1, ::3], logits[1, -1] = -torch.inf, 2.0
    rows, slots = table({"temperature": 1.0} | asked), torch.zeros(6, dtype=torch.int64)
    _, bounds = reference_sampling.choose_truncated(logits, rows, slots, slots)
    for row, (least, most) in zip(logits.numpy(), bounds.tolist(), strict=True):
        kept = (row >= least) & (row <= most) & np.isfinite(row)
        np.testing.assert_array_equal(kept, kept_weights(row, **asked) > 0)
