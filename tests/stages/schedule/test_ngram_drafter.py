"""Prompt lookup: drafts from earlier occurrences of the last tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from millrace.stages.messages import TokenRequest
from millrace.stages.params import SamplingParams
from millrace.stages.schedule.ngram_drafter import MOST_TEXTS, NgramDrafter, continuation
from millrace.stages.schedule.scheduler import Limits, Scheduler


def after(text: str, num_tokens: int = 3, *, least: int = 1, most: int = 4) -> tuple[str, int]:
    """(what follows, by how many characters it was found) of a text of a token a character."""
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    found, num_matched = continuation(tokens, least, most, num_tokens)
    return bytes(found.tolist()).decode(), num_matched


def test_what_followed_the_same_tokens_is_what_comes_next():
    assert after("the cat sat; the c") == ("at ", 4)


def test_the_longest_match_wins_over_a_later_shorter_one():
    assert after("xab1 yb2 xab") == ("1 y", 3)


def test_of_matches_as_long_the_last_one_wins():
    assert after("xab1 yab2 zab") == ("2 z", 2)


def test_a_match_counts_up_to_the_most_that_is_looked_at():
    assert after("abcdefgh1 bcdefgh2 abcdefgh", most=3) == ("2 a", 3)


def test_nothing_comes_of_a_match_that_is_too_short():
    assert after("ab1 cb", least=2) == ("", 1)
    assert after("abc", least=1) == ("", 0)


def test_what_runs_into_the_end_goes_on_as_a_period_does():
    assert after("xyxyx", 5) == ("yxyxy", 3)
    assert after("aa", 3) == ("aaa", 1)


@pytest.mark.parametrize("text", ["a", "ab"])
def test_a_text_that_says_nothing_twice_is_no_guide(text: str):
    assert after(text)[0] == ""


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_a_plain_search_finds(seed: int):
    dice = random.Random(seed)
    tokens = [dice.randrange(3) for _ in range(dice.randrange(1, 40))]
    least, most, num_tokens = dice.randrange(1, 3), dice.randrange(3, 6), dice.randrange(1, 9)
    found, _ = continuation(np.array(tokens, np.int32), least, most, num_tokens)
    assert found.tolist() == searched(tokens, least, most, num_tokens)


def searched(tokens: list[int], least: int, most: int, num_tokens: int) -> list[int]:
    """The same, as a plain loop."""
    for size in range(most, least - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                text = list(tokens)
                for _ in range(num_tokens):
                    text.append(text[end + len(text) - len(tokens)])
                return text[len(tokens) :]
    return []


# -- from the slot table


def running(prompts: list[list[int]]) -> Scheduler:
    scheduler = Scheduler(Limits(max_num_seqs=32, max_num_batched_tokens=512, max_model_len=64, block_size=4))
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=20)
        scheduler.add(TokenRequest(f"r{number}", 0, np.array(prompt, np.int32), params, number))
    scheduler.plan()
    return scheduler


def tell(scheduler: Scheduler, slot: int, first_place: int, *tokens: int) -> None:
    places = np.arange(first_place, first_place + len(tokens))
    scheduler.slots.note_tokens(np.full(len(tokens), slot), places, np.array(tokens))


def test_a_guess_is_made_of_prompt_and_answer_as_far_as_they_are_told():
    scheduler, drafter = running([[1, 2, 3, 4]]), NgramDrafter(1, 2, 2)
    slot = scheduler.sequences[0].slot
    assert drafter.guess(scheduler.slots, slot).num_known == 4
    tell(scheduler, slot, 0, 9, 2, 3)
    guess = drafter.guess(scheduler.slots, slot)
    assert (guess.slot, guess.sequence_id, guess.num_known, guess.is_sure) == (slot, 0, 7, True)
    assert guess.token_ids.tolist() == [4, 9]
    tell(scheduler, slot, 3, 4)
    assert drafter.guess(scheduler.slots, slot).token_ids.tolist() == [9, 2]


def test_a_guess_is_sure_only_of_a_match_as_long_as_is_asked_for():
    scheduler, drafter = running([[1, 2, 3, 9, 2]]), NgramDrafter(1, 2, 2)
    guess = drafter.guess(scheduler.slots, scheduler.sequences[0].slot)
    assert guess.token_ids.tolist() == [3, 9] and not guess.is_sure


def test_who_takes_a_slot_over_is_read_anew():
    scheduler, drafter = running([[5, 6, 5]]), NgramDrafter(1, 2, 1)
    slot = scheduler.sequences[0].slot
    assert drafter.guess(scheduler.slots, slot).token_ids.tolist() == [6]
    sequence = scheduler.slots.sequences[slot]
    assert sequence is not None
    other = replace(sequence, sequence_id=1, token_ids=np.array([7, 8, 7], np.int32))
    scheduler.slots.sequences[slot] = other
    assert drafter.guess(scheduler.slots, slot).token_ids.tolist() == [8]


def test_it_keeps_no_more_texts_than_a_few():
    scheduler, drafter = running([[number, number] for number in range(MOST_TEXTS + 2)]), NgramDrafter(1, 1, 1)
    for sequence in scheduler.sequences.values():
        drafter.guess(scheduler.slots, sequence.slot)
    assert len(drafter._texts) == MOST_TEXTS
    assert drafter.guess(scheduler.slots, scheduler.sequences[0].slot).token_ids.tolist() == [0]
