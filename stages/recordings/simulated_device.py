"""A device with step times from a cost model, and a drafter that is right as recorded.

Part of the simulation. Token ids have no meaning. The outcome of a step is computed when the step is granted, and
delivered when it is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..array_checks import num_true
from ..config import MAX_SPECULATIVE_TOKENS
from ..messages import Bools, Guess, Indices, Ints, StepDone, StepGrant
from ..schedule.slot_table import SlotTable
from ..schedule.step_timing.step_time_model import StepContents
from .cost_model import CostModel
from .repetition import GuessOutcome, Repetition


class SimulatedStep(NamedTuple):
    """A step on the device."""

    end_s: float
    done: StepDone
    is_steady: bool  # the same rows as in the step before; none began or ended


@dataclass(slots=True, eq=False)
class _Steady:
    """Rows that go on decoding. Only a few numbers change from one step to the next."""

    slots: Indices  # [R]
    sequence_ids: NDArray[np.int64]
    places: Indices  # of the next tokens
    token_ids: Indices
    is_finished: Bools  # all false
    num_context: int
    num_left: int  # steps before any row ends


class SimulatedDrafter:
    """Guesses where an engine's own drafter would.

    `repeats` has the recorded repetitions by sequence.
    """

    def __init__(self, repeats: Mapping[int, Repetition], num_tokens: int) -> None:
        self._repeats, self._num_tokens = repeats, num_tokens

    def guess(self, table: SlotTable, slot: int) -> Guess:
        """The guess for the sequence in `slot`: zeros, as many as could be drafted."""
        sequence = table.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        place, repeats = len(table.answer(slot)), self._repeats.get(sequence.sequence_id)
        found = GuessOutcome.NOTHING if repeats is None else repeats.at(place)[0]
        token_ids = np.zeros(self._num_tokens if found else 0, np.intp)
        return Guess(slot, sequence.sequence_id, sequence.num_prompt + place, token_ids, found == GuessOutcome.SURE)


class SimulatedDevice:
    """Runs granted steps one after another.

    `repeats` gives the number of right drafts of each sequence.
    """

    def __init__(self, model: CostModel, num_slots: int, repeats: Mapping[int, Repetition]) -> None:
        self.num_steps = 0
        self.busy_s = 0.0
        self.flights: deque[SimulatedStep] = deque()  # not done yet, in order
        self._model = model
        self._free_at_s = 0.0
        self._steady: _Steady | None = None
        self._repeats = repeats
        self._zeros = np.zeros(num_slots + MAX_SPECULATIVE_TOKENS, np.intp)  # the ids of all tokens
        self._sequence_id = np.full(num_slots, -1, np.int64)  # [S], this and the next, by slot
        self._num_generated = np.zeros(num_slots, np.intp)
        self._num_wanted = np.zeros(num_slots, np.intp)  # tokens of the answer
        self._is_over = np.ones(num_slots, np.bool_)

    def launch(self, grant: StepGrant, now_s: float) -> None:
        """Queues a step."""
        steady = self._steady
        if steady is not None and grant.slots is steady.slots and grant.is_decode and not grant.copies:
            contents = StepContents(num_decode=len(grant.slots), num_context=steady.num_context)
            took_s = self._model.seconds(contents)
            done, is_steady = self._repeat_step(grant.step, steady, took_s), True
        else:
            self._write_progress()
            num_copied = sum(len(copy.sources) for copy in grant.copies)
            num_drafts = 0 if grant.drafts is None else int(grant.drafts.counts.sum())
            contents = StepContents.of(grant.starts, grant.num_certain, num_copied, len(grant.started), num_drafts)
            took_s = self._model.seconds(contents)
            done, is_steady = self._sample(grant, took_s), False
            if grant.is_decode and len(done.slots) == len(grant.slots) and not num_true(done.is_finished):
                self._steady = self._steady_of(grant, done, contents)
        self._free_at_s = max(now_s, self._free_at_s) + took_s
        self.flights.append(SimulatedStep(self._free_at_s, done, is_steady))
        self.num_steps += 1
        self.busy_s += took_s

    def _sample(self, grant: StepGrant, took_s: float) -> StepDone:
        """One token for each sampled row that has not ended, and one more for each right draft."""
        for started in grant.started:
            slot, num_wanted = started.slot, started.params.max_tokens
            assert num_wanted is not None
            self._sequence_id[slot], self._num_wanted[slot] = started.sequence_id, num_wanted
            self._num_generated[slot] = len(started.token_ids) - started.num_prompt
            self._is_over[slot] = False
        rows = grant.slots[grant.is_sampled]
        is_alive = ~self._is_over[rows]
        rows, most_tokens = rows[is_alive], 1
        places = self._num_generated[rows]
        if grant.drafts is not None:
            most_tokens = 1 + int(grant.drafts.counts.max())
            num_right = self._num_right(rows, places, grant.drafts.counts[grant.is_sampled][is_alive])
            rows, places = _with_right(rows, places, num_right)
        num_generated = self._num_generated[rows] = places + 1  # for a repeated row the last one counts
        is_finished = num_generated >= self._num_wanted[rows]
        self._is_over[rows] = is_finished
        columns = (rows, self._sequence_id[rows], places, self._zeros[: len(rows)], is_finished)
        return StepDone(grant.step, *columns, most_tokens, int(took_s * 1e6))

    def _num_right(self, rows: Indices, places: Indices, counts: Ints) -> Indices:
        """The number of right drafts of each row, [R], of `counts` drafts."""
        repeats = [self._repeats.get(sequence_id) for sequence_id in self._sequence_id[rows].tolist()]
        right = [0 if each is None else each.at(place)[1] for each, place in zip(repeats, places.tolist(), strict=True)]
        return np.minimum(np.array(right, np.intp), counts)

    def _steady_of(self, grant: StepGrant, done: StepDone, contents: StepContents) -> _Steady | None:
        num_left = int((self._num_wanted[done.slots] - self._num_generated[done.slots]).min()) - 1
        if num_left < 1:
            return None
        context = contents.num_context + len(done.slots)
        columns = (grant.slots, done.sequence_ids, done.places + 1, done.token_ids, done.is_finished)
        return _Steady(*columns, context, num_left)

    def _repeat_step(self, step: int, steady: _Steady, took_s: float) -> StepDone:
        columns = (steady.slots, steady.sequence_ids, steady.places, steady.token_ids, steady.is_finished)
        steady.places = steady.places + 1
        steady.num_context += len(steady.slots)
        steady.num_left -= 1
        if not steady.num_left:
            self._write_progress()
        return StepDone(step, *columns, took_us=int(took_s * 1e6))

    def _write_progress(self) -> None:
        """Stores the progress of steady rows, when rows come or go."""
        if self._steady is not None:
            self._num_generated[self._steady.slots] = self._steady.places
            self._steady = None


def _with_right(rows: Indices, places: Indices, num_right: Indices) -> tuple[Indices, Indices]:
    """Rows and places, [R] each, with an entry for each right draft after its row."""
    sizes = 1 + num_right
    ends = np.cumsum(sizes)
    offsets = np.arange(int(sizes.sum())) - np.repeat(ends - sizes, sizes)
    return np.repeat(rows, sizes), np.repeat(places, sizes) + offsets
