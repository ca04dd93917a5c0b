"""How an answer repeats what was said before: at each place, what the n-gram drafter would have found there, and how
many of its drafts would have been right.

A recording tells this in place of tokens, whether or not anybody drafted: so it can be simulated with drafts where they
were not worth their while. It says where an answer repeats something and for how long, and neither what nor since when.

Knows what `stages/schedule/ngram_drafter.py` would guess, for all places at once; refuses to know when drafting pays
(`stages/schedule/speculation.py`).
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
from .format import Fields, Given, RecordedEngine, Wrong

MOST_RIGHT = MAX_SPECULATIVE_TOKENS  # drafts that are looked at: so many, or more, are right
PLACES_AT_ONCE = 4096  # whose drafts are compared: 2 MiB


class Found(IntEnum):
    """What there is to a guess."""

    NOTHING = 0
    GUESS = 1
    SURE = 2  # as many tokens stood there before as make it worth to try


@dataclass(frozen=True, slots=True, eq=False)
class Repeats:
    """Of one answer, place by place from 0 on: when so many of its tokens are known, what the drafter finds, and how
    many of its drafts are right. In runs of places, [C] each: within one, a draft fewer is right at each next place, or
    MOST_RIGHT at all of them."""

    ends: Sequence[int]  # the place behind each run, ever later
    found: Sequence[int]  # `Found`, of all its places
    right: Sequence[int]  # drafts, at its first place

    def at(self, place: int) -> tuple[Found, int]:
        """(what is found, how many drafts are right) when `place` tokens of the answer are known. Nothing where nothing
        is told."""
        run = bisect_right(self.ends, place)
        if run == len(self.ends):
            return Found.NOTHING, 0
        right, begin = self.right[run], self.ends[run - 1] if run else 0
        return Found(self.found[run]), right if right == MOST_RIGHT else max(0, right - (place - begin))

    def to_fields(self, sequence_id: int) -> Fields:
        """As plain values."""
        counts = np.diff(self.ends, prepend=0).tolist()
        return {"sequence_id": sequence_id, "counts": counts, "found": self.found, "right": self.right}


def read_repeats(values: Mapping[str, Any], engine: RecordedEngine) -> tuple[int, Repeats]:
    """The sequence that is told of, and what. Nothing of the size of its numbers is made."""
    given = Given("repeats", values)
    counts = given.wholes("counts", engine.max_model_len, 1)
    found, right = given.wholes("found", max(Found)), given.wholes("right", MOST_RIGHT)
    if not len(counts) == len(found) == len(right) or sum(counts) > engine.max_model_len:
        raise Wrong(
            f"repeats: must have as many counts as found and right, that add up to {engine.max_model_len} at most"
        )
    return given.whole("sequence_id", 0, 2**53), Repeats([*accumulate(counts)], found, right)


def repeats_of(token_ids: Ints, num_prompt: int, least: int, most: int) -> Repeats | None:
    """What a drafter that looks for `least` to `most` last tokens would have found in the answer behind a prompt of
    `num_prompt` tokens, [T] together; None: nothing anywhere. Takes 0.1 ms, and 0.1 to 0.2 us a token."""
    if len(token_ids) == num_prompt:
        return None
    num_matched, sources = _earlier(token_ids[:-1], num_prompt - 1, most)  # [T - P]
    found = np.where(num_matched >= least, Found.GUESS, Found.NOTHING)
    found[num_matched >= most] = Found.SURE
    if not found.any():
        return None
    right = np.zeros(len(found), np.intp)
    places = found.nonzero()[0]
    for begin in range(0, len(places), PLACES_AT_ONCE):
        some = places[begin : begin + PLACES_AT_ONCE]
        right[some] = _num_alike(token_ids, some + num_prompt, sources[some])
    return _in_runs(found, right)


def _earlier(token_ids: Ints, first: int, most: int) -> tuple[Indices, Indices]:
    """Of each token from `first` on: how many, up to `most`, of it and those before it stood somewhere earlier; and
    what follows them there, the last time. [T - first] both, of `token_ids` [T].

    Sorts all tokens once, and then those that may match further: where an answer repeats little, those are few.
    """
    num_matched, sources = np.zeros(len(token_ids), np.intp), np.zeros(len(token_ids), np.intp)
    at = np.arange(len(token_ids))  # tokens that may match, as the last of so many; in the order of the text
    keys = token_ids.astype(np.int64)  # the same where they do
    for length in range(1, most + 1):
        order = np.argsort(keys, kind="stable")
        keys, at = keys[order], at[order]
        is_alike = keys[1:] == keys[:-1]
        later = at[1:][is_alike]
        num_matched[later], sources[later] = length, at[:-1][is_alike] + 1
        ends = np.append(~is_alike, True).nonzero()[0]  # of groups that are alike
        sizes = np.diff(ends, prepend=-1)
        group = np.repeat(np.arange(len(ends)), sizes)
        is_kept = np.repeat((sizes > 1) & (at[ends] >= first), sizes) & (at >= length)
        at, group = at[is_kept], group[is_kept]
        if not len(at):
            break
        keys = group << 32 | token_ids[at - length]
    return num_matched[first:], sources[first:]


def _num_alike(token_ids: Ints, places: Indices, sources: Indices) -> Indices:
    """How many tokens from each of `places` on are those from each of `sources` on, [n], up to MOST_RIGHT."""
    none = np.full(MOST_RIGHT + 1, -1, token_ids.dtype)
    windows = sliding_window_view(np.concatenate([token_ids, none]), MOST_RIGHT + 1)
    is_alike = windows[places] == windows[sources]
    is_alike[:, MOST_RIGHT] = False
    num_alike: Indices = is_alike.argmin(axis=1)
    return num_alike


def _in_runs(found: NDArray[Any], right: Indices) -> Repeats:
    follows = np.where(right == MOST_RIGHT, right, np.maximum(right - 1, 0))[:-1]
    begins = np.append(True, (found[1:] != found[:-1]) | (right[1:] != follows)).nonzero()[0]
    ends = np.append(begins[1:], len(found))
    return Repeats(ends.tolist(), found[begins].tolist(), right[begins].tolist())


class Answers:
    """The texts of sequences that may draft, from their arrival to their end. Holds 4 bytes for each token that is
    answered; prompts are shared with who sent them."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._prompts: dict[int, Ints] = {}
        self._answers: dict[int, array[int]] = {}

    def __len__(self) -> int:
        """Sequences that have not ended."""
        return len(self._answers)

    def take(self, batch: Sequence[Any], over: Iterable[int]) -> list[Fields]:
        """What schedule took, and the sequences that are over besides those that finished: what is told of all that
        ended so."""
        ended = []
        for message in batch:
            if isinstance(message, TokenRequest):
                self._begin(message)
            elif isinstance(message, StepDone):
                self._go_on(message)
                ended += message.sequence_ids[message.is_finished].tolist()
        told = ((sequence_id, self._end(sequence_id)) for sequence_id in (*ended, *over))
        return [repeats.to_fields(sequence_id) for sequence_id, repeats in told if repeats is not None]

    def _begin(self, request: TokenRequest) -> None:
        if not may_draft(request):
            return
        first = request.first_sequence_id
        for sequence_id in range(first, first + request.params.n):
            self._prompts[sequence_id] = request.token_ids
            self._answers.setdefault(sequence_id, array("i"))  # it may be said twice

    def _go_on(self, done: StepDone) -> None:
        answers = self._answers
        rows = zip(done.sequence_ids.tolist(), done.places.tolist(), done.token_ids.tolist(), strict=True)
        for sequence_id, place, token_id in rows:
            answer = answers.get(sequence_id)
            if answer is not None and place == len(answer):
                answer.append(token_id)

    def _end(self, sequence_id: int) -> Repeats | None:
        answer = self._answers.pop(sequence_id, None)
        if answer is None:
            return None
        prompt = self._prompts.pop(sequence_id)
        token_ids = np.concatenate([prompt, np.array(answer, np.int32)])
        return repeats_of(token_ids, len(prompt), self._least, self._most)
