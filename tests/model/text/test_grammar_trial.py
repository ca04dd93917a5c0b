"""The cost of a grammar: one slow trial is forgiven, a grammar that is costly each time is refused."""

from __future__ import annotations

import random

import pytest
from llguidance import LLMatcher

from millrace.model.text import grammar_trial
from millrace.model.text.grammar_trial import MAX_STEP_S, MAX_TRIALS, GrammarTrials
from millrace.model.text.vocabulary import Vocabulary

EOS = 256
VOCABULARY = Vocabulary([bytes([i]) for i in range(256)] + [b""], frozenset({EOS}), (EOS,), vocab_size=257)
ONE_TOKEN = "[a-z]"
COSTLY = f"is too costly to follow: more than {MAX_STEP_S * 1e3:g} ms of CPU a token"


class SlowTrials(GrammarTrials):
    """The first answers take the given times, the later ones their own."""

    def __init__(self, *answers_s: float) -> None:
        super().__init__(VOCABULARY)
        self.answers_s = list(answers_s)
        self.num_written = 0

    def _write(self, matcher: LLMatcher, draw: random.Random) -> tuple[float, int]:
        answer_s, num_steps = super()._write(matcher, draw)
        self.num_written += 1
        return self.answers_s.pop(0) if self.answers_s else answer_s, num_steps

    def tried(self) -> bytes:
        return self.answer(b'{"kind": "regex", "source": "%s", "is_compact": false}' % ONE_TOKEN.encode())


def test_a_grammar_is_not_blamed_for_a_processor_that_was_away() -> None:
    trials = SlowTrials(*[3 * MAX_STEP_S] * (MAX_TRIALS - 2), 0.0)
    assert b"error" not in trials.tried()
    assert trials.num_written == MAX_TRIALS - 1


def test_a_grammar_that_is_not_costly_is_tried_once() -> None:
    trials = SlowTrials(MAX_STEP_S)
    assert b"error" not in trials.tried()
    assert trials.num_written == 1


def test_a_grammar_that_is_costly_each_time_is_refused() -> None:
    trials = SlowTrials(*[1.1 * MAX_STEP_S] * MAX_TRIALS)
    assert COSTLY.encode() in trials.tried()
    assert trials.num_written == MAX_TRIALS


def test_what_takes_longer_than_any_gap_is_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = SlowTrials(*[1.1 * MAX_STEP_S] * 2)
    monkeypatch.setattr(grammar_trial, "MAX_TRIALS_S", 0.0)
    assert COSTLY.encode() in trials.tried()
    assert trials.num_written == 2


def test_a_regex_of_sixty_thousand_letters_is_too_costly_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some 30 ms a token, of which a whole answer would be two seconds."""
    monkeypatch.setattr(grammar_trial, "NUM_TOKENS", 2)
    monkeypatch.setattr(grammar_trial, "MAX_TRIALS_S", 0.0)
    answer = GrammarTrials(VOCABULARY).answer(b'{"kind": "regex", "source": "((a{100}){100}){6}", "is_compact": false}')
    assert COSTLY.encode() in answer
