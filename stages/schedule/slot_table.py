"""The scheduler's slots: the progress of each running sequence, in columns indexed by slot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..array_checks import equal
from ..messages import Indices, Ints
from .sequence import Sequence, State

STEPS_WRITTEN_AT_ONCE = 32


class SlotTable:
    """The progress of the sequence in each slot. Columnar: all arrays are indexed by slot, [S].

    `num_known` counts the tokens that exist once the steps in flight are done. `num_computed` of them then have keys
    and values. `num_generated` counts the answer tokens that the device has reported.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.sequence_id = np.full(num_slots, -1, np.int64)
        self.is_running = np.zeros(num_slots, np.bool_)
        self.num_prompt = np.zeros(num_slots, np.int32)
        self.num_known = np.zeros(num_slots, np.int32)
        self.num_computed = np.zeros(num_slots, np.int32)
        self.num_generated = np.zeros(num_slots, np.intp)
        self.limit = np.zeros(num_slots, np.int32)  # tokens up to which the sequence runs in its slot
        self.reserve = np.zeros(num_slots, np.int32)  # tokens to allocate blocks for at once; 0: as needed
        self.weight = np.zeros(num_slots, np.float64)  # lower is served first; ties by sequence id
        self.is_parked = np.zeros(num_slots, np.bool_)  # holds slot and blocks, and is not served
        self.last_step = np.full(num_slots, -1, np.int64)  # the last planned step with a row of this slot
        self.generated = np.zeros((num_slots, 64), np.int32)  # [S, W] token ids, in order; W grows
        self._unwritten: list[tuple[Indices, Indices, Indices]] = []  # (slots, places, token ids) of each step
        self._free = list(range(num_slots - 1, -1, -1))
        self._leaving: list[tuple[int, int]] = []  # (last step that may use the slot, slot)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_leaving(self) -> int:
        """Slots that become free once the steps in flight are done."""
        return len(self._leaving)

    @property
    def num_running(self) -> int:
        return self.num_slots - len(self._free) - len(self._leaving)

    def running(self) -> Indices:
        """Slots of running sequences, [R]."""
        return self.is_running.nonzero()[0]

    def served(self) -> Indices:
        """Slots of running sequences that are not parked, in the order of service, [R]."""
        slots = (self.is_running & ~self.is_parked).nonzero()[0]
        return slots[np.lexsort((self.sequence_id[slots], self.weight[slots]))]

    def enter(self, sequence: Sequence, weight: float) -> int:
        """Gives `sequence` a free slot, which it returns. Check `num_free` first."""
        self._write_down()  # before the slot changes its sequence
        slot = self._free.pop()
        sequence.slot = slot
        self.sequences[slot] = sequence
        self.sequence_id[slot] = sequence.sequence_id
        self.is_running[slot] = True
        self.num_prompt[slot] = sequence.num_prompt
        self.num_known[slot] = len(sequence.token_ids)
        self.num_computed[slot] = 0
        self.last_step[slot] = -1
        self.limit[slot] = sequence.run_limit
        self.weight[slot] = weight
        self.is_parked[slot] = sequence.is_parked
        self.reserve[slot] = sequence.run_limit - 1 if sequence.is_protected else 0
        answered = sequence.token_ids[sequence.num_prompt :]
        self._grow_generated(sequence.limit - sequence.num_prompt)
        self.generated[slot, : len(answered)] = answered
        self.num_generated[slot] = len(answered)
        return slot

    def leave(self, slot: int) -> None:
        """The sequence in `slot` stops running.

        `settle` frees the slot once its last granted step is done.
        """
        self.is_running[slot] = False
        self._leaving.append((int(self.last_step[slot]), slot))

    def free_slots(self, completed_step: int, last_granted: int) -> list[Sequence]:
        """Frees the slots that no step in flight uses any more.

        Returns their preempted sequences, now with all tokens known.
        """
        if not self._leaving:
            return []
        back: list[Sequence] = []
        kept: list[tuple[int, int]] = []
        for last_step, slot in self._leaving:
            if min(last_step, last_granted) > completed_step:
                kept.append((last_step, slot))
                continue
            sequence = self.sequences[slot]
            assert sequence is not None
            if sequence.state is State.PREEMPTED:
                sequence.token_ids = self.known_tokens(sequence)
                back.append(sequence)
            sequence.slot = -1
            self.sequences[slot] = None
            self.sequence_id[slot] = -1
            self._free.append(slot)
        self._leaving = kept
        return back

    def known_tokens(self, sequence: Sequence) -> Ints:
        """The prompt and the answer so far of a sequence with a slot, [P + G]."""
        return np.concatenate([sequence.token_ids[: sequence.num_prompt], self.answer(sequence.slot)])

    def answer(self, slot: int) -> Ints:
        """The reported answer tokens of the sequence in `slot`, [G].

        A view, valid until the next change.
        """
        self._write_down()
        return self.generated[slot, : self.num_generated[slot]]

    def note_tokens(self, slots: Indices, places: Indices, token_ids: Indices) -> None:
        """Records `token_ids[i]` as answer token `places[i]` of `slots[i]`. Idempotent.

        Tokens are written to `generated` for many steps at once, since its rows lie far apart in memory and are read
        only when a sequence is recomputed or drafts (256 sequences: 15 us a step instead of 180).
        """
        self._unwritten.append((slots, places, token_ids))
        if len(self._unwritten) >= STEPS_WRITTEN_AT_ONCE:
            self._write_down()

    def _write_down(self) -> None:
        if not self._unwritten:
            return
        slots, places, token_ids = (np.concatenate(columns) for columns in zip(*self._unwritten, strict=True))
        self._unwritten.clear()
        self.generated[slots, places] = token_ids
        np.maximum.at(self.num_generated, slots, places + 1)

    def knows(self, slots: Indices, sequence_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[L] whether each row's sequence still has the slot."""
        known: NDArray[np.bool_] = self.sequence_id[slots] == sequence_ids
        return known

    def knows_all(self, slots: Indices, sequence_ids: NDArray[np.int64]) -> bool:
        """Whether all rows' sequences still have their slots, which is nearly always so."""
        return equal(self.sequence_id[slots], sequence_ids)

    def _grow_generated(self, num_answer: int) -> None:
        width = self.generated.shape[1]
        if num_answer > width:
            grown = np.zeros((self.num_slots, max(num_answer, 2 * width)), np.int32)
            grown[:, :width] = self.generated
            self.generated = grown
