"""The requests of several fronts in one engine: whose is which, under what number.

Each front numbers its requests and sequences itself, so the numbers of two may be equal. The engine gives each its own,
and translates what goes back. Slots are the engine's for all fronts: each hears only of those that hold its sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..messages import Indices, StepTokens, TokenRequest

V = TypeVar("V")

NOBODY = -1


class _Owned(NamedTuple):
    front: int
    number: int  # of the sequence, at its front


class FrontTable:
    """Translates the numbers of requests and sequences. Fronts have small whole numbers, which are never used again."""

    def __init__(self, num_slots: int) -> None:
        self._next = 0  # number of the next sequence
        self._owned: dict[int, _Owned] = {}  # by the engine's number of a sequence
        self._numbers: dict[int, dict[int, int]] = {}  # by front: its number -> the engine's
        self._requests: dict[int, dict[str, list[int]]] = {}  # by front: the engine's numbers of each request
        self._front_of = np.full(num_slots, NOBODY, np.int32)  # [S] the front whose sequence holds or held the slot
        self._number_of = np.zeros(num_slots, np.int64)  # [S] the number of that sequence at its front

    def add(self, front: int) -> None:
        """A front is there."""
        self._numbers[front], self._requests[front] = {}, {}

    # -- from a front

    def take(self, front: int, request: TokenRequest) -> TokenRequest:
        """The prompt as the engine knows it. One that comes twice keeps its numbers."""
        numbers, request_id = self._numbers[front], to_engine(front, request.request_id)
        theirs = range(request.first_sequence_id, request.first_sequence_id + request.params.n)
        first = numbers.get(theirs[0])
        if first is None:
            first, self._next = self._next, self._next + len(theirs)
            ours = range(first, self._next)
            numbers.update(zip(theirs, ours, strict=True))
            self._owned.update((one, _Owned(front, number)) for one, number in zip(ours, theirs, strict=True))
            self._requests[front].setdefault(request.request_id, []).extend(ours)
        return replace(request, request_id=request_id, first_sequence_id=first)

    def causes(self, front: int, causes: Mapping[int, str]) -> dict[int, str]:
        """Entries for the control lane, without those of sequences that have ended."""
        numbers = self._numbers[front]
        return {numbers[theirs]: cause for theirs, cause in causes.items() if theirs in numbers}

    def forget(self, front: int, request_ids: Iterable[str]) -> list[str]:
        """These requests have ended. Returns their ids in the engine."""
        numbers, requests = self._numbers[front], self._requests[front]
        gone = []
        for request_id in request_ids:
            ours = requests.pop(request_id, None)
            if ours is not None:
                gone.append(to_engine(front, request_id))
                for one in ours:
                    del numbers[self._owned.pop(one).number]
        return gone

    def drop(self, front: int) -> tuple[list[str], list[int]]:
        """A front is gone, and all its requests with it: (their ids, their sequences), as the engine knows them."""
        sequences = [one for ours in self._requests[front].values() for one in ours]
        gone = self.forget(front, list(self._requests[front]))
        del self._numbers[front], self._requests[front]
        self._front_of[self._front_of == front] = NOBODY
        return gone, sequences

    # -- to the fronts

    def by_front(self, by_sequence: Mapping[int, V]) -> dict[int, dict[int, V]]:
        """What is told of sequences, for each front by its own numbers. Ended sequences are left out."""
        split: dict[int, dict[int, V]] = {}
        for one, value in by_sequence.items():
            if (owned := self._owned.get(one)) is not None:
                split.setdefault(owned.front, {})[owned.number] = value
        return split

    def rows_of(self, front: int, sequence_ids: Iterable[int]) -> tuple[list[int], list[int]]:
        """The rows whose sequences are of a front, and their numbers there."""
        owned = [(row, self._owned.get(one)) for row, one in enumerate(sequence_ids)]
        mine = [(row, one.number) for row, one in owned if one is not None and one.front == front]
        return [row for row, _ in mine], [number for _, number in mine]

    def split(self, step: StepTokens) -> list[tuple[int, StepTokens]]:
        """The step of each front that has a part in it. With one front that is all of it, with other numbers."""
        self._note_started(step)
        fronts = self._front_of[step.slots]
        concerned = dict.fromkeys(np.unique(fronts).tolist())
        ids = [one.sequence_id for one in step.prompt_logprobs]
        ids += [one.sequence_id for one in step.progress]
        ids += [one.sequence_id for one in step.pooled.values()]
        ids += [one.sequence_id for one in step.started]
        concerned.update(dict.fromkeys(self._front(one) for one in ids))
        concerned.pop(NOBODY, None)
        return [(front, self._part(step, front, fronts)) for front in concerned]

    def _note_started(self, step: StepTokens) -> None:
        for started in step.started:
            owned = self._owned.get(started.sequence_id)
            self._front_of[started.slot], self._number_of[started.slot] = (NOBODY, 0) if owned is None else owned

    def _front(self, sequence_id: int) -> int:
        owned = self._owned.get(sequence_id)
        return NOBODY if owned is None else owned.front

    def _part(self, step: StepTokens, front: int, fronts: NDArray[np.int32]) -> StepTokens:
        rows: Indices = (fronts == front).nonzero()[0]
        places = {row: place for place, row in enumerate(rows.tolist())} if step.logprobs else {}
        mine = self._owned
        return StepTokens(
            step.step,
            step.slots[rows],
            self._number_of[step.slots[rows]],
            step.places[rows],
            step.token_ids[rows],
            step.finishes[rows],
            tuple(
                replace(one, sequence_id=mine[one.sequence_id].number, request_id=to_front(one.request_id))
                for one in step.started
                if self._front(one.sequence_id) == front
            ),
            {places[row]: value for row, value in step.logprobs.items() if row in places},
            {
                slot: replace(one, sequence_id=mine[one.sequence_id].number)
                for slot, one in step.pooled.items()
                if self._front(one.sequence_id) == front
            },
            [
                replace(one, sequence_id=mine[one.sequence_id].number)
                for one in step.prompt_logprobs
                if self._front(one.sequence_id) == front
            ],
            [
                replace(one, sequence_id=mine[one.sequence_id].number)
                for one in step.progress
                if self._front(one.sequence_id) == front
            ],
            step.began_s,
            step.grammar_us,
        )

    def check(self) -> None:
        """Raises AssertionError unless all tables tell the same."""
        for front, numbers in self._numbers.items():
            for theirs, ours in numbers.items():
                assert self._owned[ours] == (front, theirs), f"sequence {ours} is not {theirs} of front {front}"
            named = sorted(one for some in self._requests[front].values() for one in some)
            assert named == sorted(numbers.values()), f"front {front} has requests of other sequences"
        assert len(self._owned) == sum(map(len, self._numbers.values())), "a sequence is of no front"


def to_engine(front: int, request_id: str) -> str:
    """A request's id in the engine."""
    return f"{request_id}@{front}"


def to_front(request_id: str) -> str:
    """The id that its front gave it."""
    return request_id.rpartition("@")[0]


def front_of(request_id: str) -> int:
    """The front of a request, by its id in the engine."""
    return int(request_id.rpartition("@")[2])
