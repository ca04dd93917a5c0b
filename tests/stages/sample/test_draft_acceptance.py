"""Draft acceptance: which tokens of a step with drafts count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from millrace.stages.messages import Drafts
from millrace.stages.sample.draft_acceptance import Runs, last_of_each
from tests.stages.grants import grant, ints


def runs(*drafts: list[int]) -> Runs:
    """Of a row of the grant for each list."""
    counts = [len(each) for each in drafts]
    made = grant([(slot, 8, 1 + count, True) for slot, count in enumerate(counts)])
    flat = np.array([token for each in drafts for token in each], np.intp)
    found = Runs.of(replace(made, drafts=Drafts(ints(*counts), flat)))
    assert found is not None
    return found


def test_without_drafts_each_row_is_by_itself():
    assert Runs.of(grant([(0, 8, 1, True)])) is None


def test_each_draft_is_what_the_row_before_it_has_to_choose():
    found = runs([7, 8], [], [9])
    assert found.offsets.tolist() == [0, 1, 2, 0, 0, 1]
    assert found.drafts.tolist() == [7, 8, -1, -1, 9, -1]


def test_a_row_that_is_not_sampled_has_no_logits():
    made = grant([(0, 0, 5, False), (1, 8, 2, True)])
    found = Runs.of(replace(made, drafts=Drafts(ints(0, 1), np.array([7]))))
    assert found is not None and found.drafts.tolist() == [7, -1]


@pytest.mark.parametrize(
    ("chosen", "counting"),
    [
        ([7, 8, 9], [0, 1, 2]),  # all right: the token behind the last draft counts as well
        ([7, 1, 9], [0, 1]),  # the one that takes the place of a wrong draft counts
        ([1, 8, 9], [0]),
        ([1, 1, 1], [0]),
    ],
)
def test_tokens_count_up_to_the_first_that_was_drafted_otherwise(chosen: list[int], counting: list[int]):
    assert runs([7, 8]).that_count(np.array(chosen)).tolist() == counting


def test_each_run_counts_by_itself():
    assert runs([7, 8], [], [9]).that_count(np.array([7, 1, 5, 4, 9, 6])).tolist() == [0, 1, 3, 4, 5]


def test_nothing_counts_behind_the_end_of_an_answer():
    found, finishes = runs([7, 8], [9]), np.array([0, 1, 2, 0, 2], np.int8)
    assert found.up_to_the_end(np.arange(5), finishes).tolist() == [0, 1, 3, 4]


def test_what_ended_before_is_left_out_whole():
    assert runs([7, 8], [9]).take(np.array([3, 4])).that_count(np.array([9, 5])).tolist() == [0, 1]


def test_the_newest_token_of_a_slot_is_its_last_row():
    assert last_of_each(np.array([3, 3, 3, 1, 2, 2])).tolist() == [2, 3, 5]
    assert last_of_each(np.array([], np.intp)).tolist() == []
