"""How an answer repeats earlier text: what the n-gram drafter would find at each place.

A recording has this instead of tokens, whether or not the engine drafted. So a simulation can use drafts even if the
recorded engine did not. It shows where an answer repeats something and for how long, but neither the text nor its
source.

This file finds what `stages/schedule/ngram_drafter.py` would guess, for all places at once.
`stages/schedule/speculation.py` decides when drafting pays.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ..config import MAX_SPECULATIVE_TOKENS
from ..messages import Indices, Ints, StepDone, TokenRequest
from ..schedule.speculation import may_draft
from .field_values import Fields, InvalidValue, MessageFields
from .recorded_engine import RecordedEngine

MOST_RIGHT = MAX_SPECULATIVE_TOKENS  # the most right drafts counted at a place
PLACES_AT_ONCE = 4096  # whose drafts are compared together: 2 MiB


class GuessOutcome(IntEnum):
    """What the drafter finds at a place."""

    NOTHING = 0
    GUESS = 1
    SURE = 2  # as many matching tokens as the drafter looks for at most


@dataclass(frozen=True, slots=True, eq=False)
class Repetition:
    """The repetitions of one answer, by place.

    At place i, i of its tokens are known: what the drafter finds there, and how many of its drafts are right. Stored as
    runs of places, [C] each: within a run the number of right drafts falls by one per place, or stays at MOST_RIGHT.
    """

    ends: Sequence[int]  # the place after each run, rising
    found: Sequence[int]  # `GuessOutcome`, of all its places
    right: Sequence[int]  # right drafts, at its first place

    def at(self, place: int) -> tuple[GuessOutcome, int]:
        """(What is found, how many drafts are right) when `place` tokens of the answer are known.

        (NOTHING, 0) after the last run.
        """
        run = bisect_right(self.ends, place)
        if run == len(self.ends):
            return GuessOutcome.NOTHING, 0
        right, begin = self.right[run], self.ends[run - 1] if run else 0
        return GuessOutcome(self.found[run]), right if right == MOST_RIGHT else max(0, right - (place - begin))

    def to_fields(self, sequence_id: int) -> Fields:
        """As plain values."""
        counts = np.diff(self.ends, prepend=0).tolist()
        return {"sequence_id": sequence_id, "counts": counts, "found": self.found, "right": self.right}


def read_repeats(values: Mapping[str, Any], engine: RecordedEngine) -> tuple[int, Repetition]:
    """The sequence id and its repetitions. Nothing is allocated by the numbers in the file."""
    given = MessageFields("repeats", values)
    counts = given.wholes("counts", engine.max_model_len, 1)
    found, right = given.wholes("found", max(GuessOutcome)), given.wholes("right", MOST_RIGHT)
    if not len(counts) == len(found) == len(right) or sum(counts) > engine.max_model_len:
        raise InvalidValue(
            f"repeats: must have as many counts as found and right, that add up to {engine.max_model_len} at most"
        )
    return given.whole("sequence_id", 0, 2**53), Repetition([*accumulate(counts)], found, right)


def repeats_of(token_ids: Ints, num_prompt: int, least: int, most: int) -> Repetition | None:
    """What a drafter that looks for `least` to `most` last tokens finds in an answer.

    `token_ids` [T] are a prompt of `num_prompt` tokens and its answer. None: nothing anywhere. Takes 0.1 ms, and 0.1 to
    0.2 us per token.
    """
    if len(token_ids) == num_prompt:
        return None
    num_matched, sources = _earlier(token_ids[:-1], num_prompt - 1, most)  # [T - P]
    found = np.where(num_matched >= least, GuessOutcome.GUESS, GuessOutcome.NOTHING)
    found[num_matched >= most] = GuessOutcome.SURE
    if not found.any():
        return None
    right = np.zeros(len(found), np.intp)
    places = found.nonzero()[0]
    for begin in range(0, len(places), PLACES_AT_ONCE):
        some = places[begin : begin + PLACES_AT_ONCE]
        right[some] = _num_alike(token_ids, some + num_prompt, sources[some])
    return _in_runs(found, right)


def _earlier(token_ids: Ints, first: int, most: int) -> tuple[Indices, Indices]:
    """For each token from `first` on: its longest earlier match, and where that continues.

    The first is how many tokens that end with it, up to `most`, occurred earlier; the second is the position after
    their last earlier occurrence. Both [T - first], of `token_ids` [T].

    Sorts all tokens once, then only those whose match may be longer: few, if an answer repeats little.
    """
    num_matched, sources = np.zeros(len(token_ids), np.intp), np.zeros(len(token_ids), np.intp)
    at = np.arange(len(token_ids))  # last tokens of possible matches, in order of position within equal keys
    keys = token_ids.astype(np.int64)  # equal where the tokens match
    for length in range(1, most + 1):
        order = np.argsort(keys, kind="stable")
        keys, at = keys[order], at[order]
        is_alike = keys[1:] == keys[:-1]
        later = at[1:][is_alike]
        num_matched[later], sources[later] = length, at[:-1][is_alike] + 1
        ends = np.append(~is_alike, True).nonzero()[0]  # of groups of equal keys
        sizes = np.diff(ends, prepend=-1)
        group = np.repeat(np.arange(len(ends)), sizes)
        is_kept = np.repeat((sizes > 1) & (at[ends] >= first), sizes) & (at >= length)
        at, group = at[is_kept], group[is_kept]
        if not len(at):
            break
        keys = group << 32 | token_ids[at - length]
    return num_matched[first:], sources[first:]


def _num_alike(token_ids: Ints, places: Indices, sources: Indices) -> Indices:
    """How many tokens from each place on equal those from its source on, [n], up to MOST_RIGHT."""
    none = np.full(MOST_RIGHT + 1, -1, token_ids.dtype)
    windows = sliding_window_view(np.concatenate([token_ids, none]), MOST_RIGHT + 1)
    is_alike = windows[places] == windows[sources]
    is_alike[:, MOST_RIGHT] = False
    num_alike: Indices = is_alike.argmin(axis=1)
    return num_alike


def _in_runs(found: NDArray[Any], right: Indices) -> Repetition:
    follows = np.where(right == MOST_RIGHT, right, np.maximum(right - 1, 0))[:-1]
    begins = np.append(True, (found[1:] != found[:-1]) | (right[1:] != follows)).nonzero()[0]
    ends = np.append(begins[1:], len(found))
    return Repetition(ends.tolist(), found[begins].tolist(), right[begins].tolist())


class AnswerHistory:
    """The texts of sequences that may draft, from their arrival to their end.

    Holds 4 bytes per answered token; prompts are shared with their requests.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._prompts: dict[int, Ints] = {}
        self._answers: dict[int, array[int]] = {}

    def __len__(self) -> int:
        """The number of sequences that have not ended."""
        return len(self._answers)

    def take(self, batch: Sequence[Any], over: Iterable[int]) -> list[Fields]:
        """Processes a batch of schedule. `over`: sequences that ended without finishing.

        Returns the repetitions of all sequences that ended.
        """
        ended = []
        for message in batch:
            if isinstance(message, TokenRequest):
                self._begin(message)
            elif isinstance(message, StepDone):
                self._note_tokens(message)
                ended += message.sequence_ids[message.is_finished].tolist()
        results = ((sequence_id, self._end(sequence_id)) for sequence_id in (*ended, *over))
        return [repeats.to_fields(sequence_id) for sequence_id, repeats in results if repeats is not None]

    def _begin(self, request: TokenRequest) -> None:
        if not may_draft(request):
            return
        first = request.first_sequence_id
        for sequence_id in range(first, first + request.params.n):
            self._prompts[sequence_id] = request.token_ids
            self._answers.setdefault(sequence_id, array("i"))  # a request may be added twice

    def _note_tokens(self, done: StepDone) -> None:
        answers = self._answers
        rows = zip(done.sequence_ids.tolist(), done.places.tolist(), done.token_ids.tolist(), strict=True)
        for sequence_id, place, token_id in rows:
            answer = answers.get(sequence_id)
            if answer is not None and place == len(answer):
                answer.append(token_id)

    def _end(self, sequence_id: int) -> Repetition | None:
        answer = self._answers.pop(sequence_id, None)
        if answer is None:
            return None
        prompt = self._prompts.pop(sequence_id)
        token_ids = np.concatenate([prompt, np.array(answer, np.int32)])
        return repeats_of(token_ids, len(prompt), self._least, self._most)
