"""Masking of token ids."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.stages.recordings.token_masking import CHUNK, TokenMasking


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.int32)


@pytest.mark.parametrize("num_prompt", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_a_prompt_and_its_answer_are_hidden_as_they_are_in_one_piece(num_prompt: int):
    text, masking = tokens(3 * CHUNK + 3), TokenMasking(b"secret")
    hidden = masking.begin([7], text[:num_prompt])
    answer = [int(masking.go_on([7], text[i : i + 1])[0]) for i in range(num_prompt, len(text))]  # over a chunk's end
    assert np.array_equal(np.concatenate([hidden, answer]), masking.hide(text))


def test_texts_are_alike_up_to_where_they_part_and_not_behind():
    one, masking = tokens(200), TokenMasking(b"secret")
    other = one.copy()
    other[100] += 1
    is_same = masking.hide(one) == masking.hide(other)
    assert is_same[:100].all() and not is_same[100:].any()


def test_a_token_has_no_number_of_its_own_and_no_secret_gives_the_same_numbers():
    hidden = TokenMasking(b"secret").hide(np.full(1000, 42, np.int32))
    assert len(np.unique(hidden)) == 1000 and hidden.min() >= 0
    assert not np.array_equal(hidden, TokenMasking(b"another").hide(np.full(1000, 42, np.int32)))


def test_sequences_that_are_over_cost_nothing_and_are_hidden_as_zeros():
    masking = TokenMasking(b"secret")
    for sequence_id in range(1000):
        masking.begin([sequence_id], tokens(3))
        masking.end(sequence_id)
    assert not len(masking) and masking.go_on([5], tokens(1)).tolist() == [0]
    assert masking.name("") == "" and masking.name("tenant") not in ("", "tenant")
