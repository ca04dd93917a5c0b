"""Masking of token ids."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.stages.recordings.token_masking import CHUNK, Veil


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.int32)


@pytest.mark.parametrize("num_prompt", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_a_prompt_and_its_answer_are_hidden_as_they_are_in_one_piece(num_prompt: int):
    text, veil = tokens(3 * CHUNK + 3), Veil(b"secret")
    hidden = veil.begin([7], text[:num_prompt])
    answer = [int(veil.go_on([7], text[i : i + 1])[0]) for i in range(num_prompt, len(text))]  # over a chunk's end
    assert np.array_equal(np.concatenate([hidden, answer]), veil.hide(text))


def test_texts_are_alike_up_to_where_they_part_and_not_behind():
    one, veil = tokens(200), Veil(b"secret")
    other = one.copy()
    other[100] += 1
    is_same = veil.hide(one) == veil.hide(other)
    assert is_same[:100].all() and not is_same[100:].any()


def test_a_token_has_no_number_of_its_own_and_no_secret_gives_the_same_numbers():
    hidden = Veil(b"secret").hide(np.full(1000, 42, np.int32))
    assert len(np.unique(hidden)) == 1000 and hidden.min() >= 0
    assert not np.array_equal(hidden, Veil(b"another").hide(np.full(1000, 42, np.int32)))


def test_sequences_that_are_over_cost_nothing_and_are_hidden_as_zeros():
    veil = Veil(b"secret")
    for sequence_id in range(1000):
        veil.begin([sequence_id], tokens(3))
        veil.end(sequence_id)
    assert not len(veil) and veil.go_on([5], tokens(1)).tolist() == [0]
    assert veil.name("") == "" and veil.name("tenant") not in ("", "tenant")
