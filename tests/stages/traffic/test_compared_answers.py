"""When an answer and its copy count as equal."""

from __future__ import annotations

import pytest

from millrace.stages.messages import FinishReason
from millrace.stages.traffic.compared_answers import ComparedChoice, SequenceTokens, verdict_of

STOP, LENGTH = int(FinishReason.STOP), int(FinishReason.LENGTH)


def choice(ours: str, copied: str, num_tokens: int | None, finish: int = 0, copied_finish: int = 0) -> ComparedChoice:
    """Tokens are letters."""
    made = ComparedChoice(num_tokens=num_tokens)
    for tokens, text, end in ((made.ours, ours, finish), (made.copied, copied, copied_finish)):
        for place, letter in enumerate(text):
            tokens.add(place, ord(letter), end if place == len(text) - 1 else 0)
    return made


@pytest.mark.parametrize(
    ("ours", "copied", "num_tokens", "finish", "copied_finish", "verdict"),
    [
        ("abc", "abc", 3, STOP, STOP, "equal"),
        ("abc", "abc", 3, STOP, LENGTH, "different"),
        ("abc", "abd", 3, STOP, 0, "different"),
        ("abc", "ab", 3, STOP, 0, None),
        ("abc", "ab", 3, STOP, STOP, "different"),
        ("abc", "abcd", 3, STOP, 0, "different"),
        ("abc", "abd", None, STOP, 0, None),
        ("abcxy", "abc", 3, 0, 0, "equal"),  # ended here by a stop string: the engine went on for two tokens
        ("abcxy", "abcz", 3, STOP, 0, "equal"),
        ("abcxy", "abz", 3, 0, 0, "different"),
        ("abcxy", "ab", 3, 0, 0, None),
        ("abcxy", "ab", 3, 0, STOP, "different"),
        ("", "", 0, 0, 0, "equal"),
    ],
)
def test_tokens_and_the_end_decide_and_behind_a_stop_string_the_beginning_does(
    ours: str, copied: str, num_tokens: int | None, finish: int, copied_finish: int, verdict: str | None
) -> None:
    assert choice(ours, copied, num_tokens, finish, copied_finish).verdict() == verdict


def test_one_different_choice_decides_and_equal_ones_must_all_be_known() -> None:
    equal, different = choice("a", "a", 1, STOP, STOP), choice("a", "b", 1, STOP, STOP)
    is_open = choice("ab", "a", 2, STOP)
    assert verdict_of([equal, equal]) == "equal" and verdict_of([equal, is_open]) is None
    assert verdict_of([is_open, different]) == "different"


def test_tokens_that_come_again_after_a_death_are_the_same() -> None:
    tokens = SequenceTokens()
    for place, token, finish in ((0, 5, 0), (1, 6, 0), (0, 5, 0), (1, 6, 0), (2, 7, STOP)):
        tokens.add(place, token, finish)
    assert tokens.token_ids == [5, 6, 7] and tokens.finish == STOP
