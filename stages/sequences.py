"""The sequences that schedule knows: who waits, who runs in which slot, and how far each has come.

Plain, columnar state behind the schedule stage. Knows no policy and no memory.
"""

from __future__ import annotations

import enum
import hashlib
import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .messages import Indices, Ints, Started
from .params import SamplingParams

STEPS_WRITTEN_AT_ONCE = 32
MAX_PREEMPTIONS = 4  # a sequence preempted this often comes back only with all it may need, and is no victim again


class State(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"  # holds a slot
    PREEMPTED = "preempted"  # lost its blocks; waits for the steps in flight that still know its slot
    SWAPPED = "swapped"  # waits to come back, with blocks on the host
    OVER = "over"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.OVER}),
    State.RUNNING: frozenset({State.PREEMPTED, State.OVER}),
    State.PREEMPTED: frozenset({State.WAITING, State.SWAPPED, State.OVER}),
    State.SWAPPED: frozenset({State.RUNNING, State.WAITING, State.OVER}),
    State.OVER: frozenset(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and one of its choices. Owned by schedule, for its whole life."""

    sequence_id: int
    request_id: str
    token_ids: Ints  # [P + G] known tokens; while it runs, those it started with
    num_prompt: int  # P
    limit: int  # tokens of prompt and answer together
    params: SamplingParams
    seed: int
    priority: int
    cache_salt: str = ""
    state: State = State.WAITING
    slot: int = -1  # while running or preempted
    num_preempted: int = 0
    num_swapped: int = 0  # tokens on the host, until they are copied back or given up
    swapped_step: int = -1  # in which they are copied there
    num_lost: int = 0  # tokens that were computed before a preemption and have not been again
    lost_for: str = ""  # what it was preempted for last: "blocks" or "slot"
    num_voids_alone: int = 0  # steps that failed with no other sequence in them

    @property
    def rank(self) -> tuple[int, bool, int]:
        """The order of admission: priority, then those that are swapped out, then arrival."""
        return (self.priority, not self.num_swapped, self.sequence_id)

    @property
    def is_protected(self) -> bool:
        """Whether it was preempted so often that it may not be again."""
        return self.num_preempted >= MAX_PREEMPTIONS

    def move(self, state: State) -> None:
        """Goes on to `state`, if life allows."""
        assert state in TRANSITIONS[self.state], f"sequence {self.sequence_id} can not go {self.state} -> {state}"
        self.state = state

    def started(self) -> Started:
        """What the stages behind must know to run it in its slot."""
        return Started(
            self.slot,
            self.sequence_id,
            self.request_id,
            self.token_ids,
            self.num_prompt,
            self.params,
            self.seed,
            self.cache_salt,
        )


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice j of a request: hash(seed, j), 63 bits, the same in every process."""
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class WaitingQueue:
    """Sequences that wait, swapped ones too, first to be served first. Those that are over are skipped and
    forgotten."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, bool, int], Sequence]] = []
        self._num_over = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_over

    def push(self, sequence: Sequence) -> None:
        """Adds a waiting sequence at the rank that it has now."""
        heapq.heappush(self._heap, (sequence.rank, sequence))

    def peek(self) -> Sequence | None:
        """The first in line, or None."""
        while self._heap and self._heap[0][1].state is State.OVER:
            heapq.heappop(self._heap)
            self._num_over -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Takes the first in line; there must be one."""
        first = self.peek()
        assert first is not None
        heapq.heappop(self._heap)
        return first

    def forget(self) -> None:
        """One of those that wait is over."""
        self._num_over += 1
        if self._num_over > 64 and self._num_over > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[1].state is not State.OVER]
            heapq.heapify(self._heap)
            self._num_over = 0

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in sorted(self._heap) if sequence.state is not State.OVER)


class SlotTable:
    """How far the sequence in each slot has come. Columnar: arrays are indexed by slot, [S].

    `num_known` counts the tokens that exist or will when the steps in flight are done; `num_computed` of them have, or
    then will have, keys and values; `num_generated` were told by the device.
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
        self.limit = np.zeros(num_slots, np.int32)
        self.reserve = np.zeros(num_slots, np.int32)  # tokens to hold blocks for, 0 = as they come
        self.priority = np.zeros(num_slots, np.int32)
        self.last_step = np.full(num_slots, -1, np.int64)  # the last granted step with a row of the slot
        self.generated = np.zeros((num_slots, 64), np.int32)  # [S, W] token ids, in order; W grows
        self._unwritten: list[tuple[Indices, Indices, Indices]] = []  # (slots, places, token ids), a step each
        self._free = list(range(num_slots - 1, -1, -1))
        self._leaving: list[tuple[int, int]] = []  # (last step that may know the slot, slot)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_leaving(self) -> int:
        """Slots that will be free once the steps in flight are done."""
        return len(self._leaving)

    @property
    def num_running(self) -> int:
        return self.num_slots - len(self._free) - len(self._leaving)

    def running(self) -> Indices:
        """Slots of running sequences in the order of service, [R]."""
        slots = np.flatnonzero(self.is_running)
        return slots[np.lexsort((self.sequence_id[slots], self.priority[slots]))]

    def enter(self, sequence: Sequence) -> int:
        """Gives `sequence` a slot; ask `num_free` first."""
        self._write_down()  # what is told of a slot's last holder ends here
        slot = self._free.pop()
        sequence.slot = slot
        self.sequences[slot] = sequence
        self.sequence_id[slot] = sequence.sequence_id
        self.is_running[slot] = True
        self.num_prompt[slot] = sequence.num_prompt
        self.num_known[slot] = len(sequence.token_ids)
        self.num_computed[slot] = 0
        self.last_step[slot] = -1
        self.limit[slot] = sequence.limit
        self.priority[slot] = sequence.priority
        self.reserve[slot] = sequence.limit if sequence.is_protected else 0
        answered = sequence.token_ids[sequence.num_prompt :]
        self._make_room(sequence.limit - sequence.num_prompt)
        self.generated[slot, : len(answered)] = answered
        self.num_generated[slot] = len(answered)
        return slot

    def leave(self, slot: int, last_step: int) -> None:
        """The sequence stops running; the slot is free once step `last_step` is done and `settle` heard of it."""
        self.is_running[slot] = False
        self._leaving.append((last_step, slot))

    def settle(self, completed_step: int, last_granted: int) -> list[Sequence]:
        """Frees the slots that no step in flight knows any more. Returns the sequences among them that were preempted,
        now with all their tokens known."""
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
        """Prompt and answer so far of a sequence that has a slot, [P + G]."""
        self._write_down()
        answered = self.generated[sequence.slot, : self.num_generated[sequence.slot]]
        return np.concatenate([sequence.token_ids[: sequence.num_prompt], answered])

    def note_tokens(self, slots: Indices, places: Indices, token_ids: Indices) -> None:
        """The device chose `token_ids[i]` as answer token `places[i]` of `slots[i]`. Said twice, it changes nothing.

        Written down for many steps at once: the rows of `generated` lie far apart, and nobody reads them until a
        sequence is to be computed anew (256 sequences: 180 us a step before, 15 now).
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
        """Which rows still speak of the sequence in their slot."""
        known: NDArray[np.bool_] = self.sequence_id[slots] == sequence_ids
        return known

    def _make_room(self, num_answer: int) -> None:
        width = self.generated.shape[1]
        if num_answer > width:
            grown = np.zeros((self.num_slots, max(num_answer, 2 * width)), np.int32)
            grown[:, :width] = self.generated
            self.generated = grown
