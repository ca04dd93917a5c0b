"""Outcomes: turns results of an asynchronous scripted device into tokens.

One row per slot, filled when a sequence starts there. The host itself checks stop ids that do not fit the device's
table.
"""

from __future__ import annotations

import numpy as np

from ....kernels.layout.step_state import MAX_STOPS
from ...backends.cuda.step_update import EndRules
from ...messages import FinishReason, Ints, Started, StepGrant, StepTokens
from ...sample.draft_acceptance import DraftRuns, last_of_each


class Outcomes:
    """The progress of each slot's sequence, by the results so far.

    Results are applied in the order of steps.
    """

    def __init__(self, num_slots: int, ends: EndRules) -> None:
        self.ends = ends
        self.sequence_ids = np.full(num_slots, -1, np.int64)
        self.num_generated = np.zeros(num_slots, np.intp)
        self.is_over = np.ones(num_slots, np.bool_)  # later results of the slot are ignored
        self._min_tokens = np.zeros(num_slots, np.intp)
        self._more_stops: dict[int, frozenset[int]] = {}  # by slot: stop ids that the device does not check

    @property
    def has_running(self) -> bool:
        """Whether any sequence goes on."""
        return not self.is_over.all()

    def note_tokens(self, grant: StepGrant, result: Ints, scores: Ints | None = None) -> StepTokens:
        """Applies a step's result, and returns the tokens of rows that had not ended before.

        `result` [2, L] is the device's, for the rows of logits: token ids, -1 where a sequence had ended before, or
        after a wrong draft; and how each ends, see `step_state.FINISHED`.
        """
        for started in grant.started:
            self._start(started)
        slots, runs = grant.logits_slots, DraftRuns.of(grant)
        counts = ((result[0] >= 0) & ~self.is_over[slots]).nonzero()[0]
        slots, token_ids = slots[counts], result[0, counts].astype(np.intp)
        finishes = result[1, counts].astype(np.int8)
        places = self.num_generated[slots]
        if runs is not None:
            places = places + runs.offsets[counts]
        if self._more_stops:
            self._find_stops(slots, places, token_ids, finishes)
        if runs is not None:
            kept = runs.up_to_the_end(counts, finishes)
            slots, places, token_ids, finishes = slots[kept], places[kept], token_ids[kept], finishes[kept]
        last = last_of_each(slots)
        self.num_generated[slots[last]] = places[last] + 1
        self.is_over[slots[last]] = finishes[last] != FinishReason.NONE
        return StepTokens(
            step=grant.step,
            slots=slots,
            sequence_ids=self.sequence_ids[slots],
            places=places,
            token_ids=token_ids,
            finishes=finishes,
            started=grant.started,
        )

    def _start(self, started: Started) -> None:
        slot = started.slot
        self.sequence_ids[slot] = started.sequence_id
        self.num_generated[slot] = len(started.token_ids) - started.num_prompt
        self.is_over[slot] = False
        self._min_tokens[slot] = started.params.min_tokens
        self._more_stops.pop(slot, None)
        more = self.ends.ids_of(started)[MAX_STOPS:]
        if more:
            self._more_stops[slot] = frozenset(more)

    def _find_stops(self, slots: Ints, places: Ints, token_ids: Ints, finishes: Ints) -> None:
        """The rest of `finish_of` in `kernels/layout/finish_rule.py`, which the device left."""
        for row, slot in enumerate(slots.tolist()):
            is_stop = int(token_ids[row]) in self._more_stops.get(slot, ())
            if is_stop and finishes[row] != FinishReason.ERROR and places[row] >= self._min_tokens[slot]:
                finishes[row] = FinishReason.STOP
