"""The sequences that wait for the device slot of their adapter, one line an adapter, and who gets a slot next.

Plain code behind the schedule stage. Sequences of other adapters and of the base model pass them in the meantime.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .adapter_slots import AdapterSlots, AdapterState
from .sequence import Sequence, WaitingQueue

MAX_PASSES = 50  # sequences admitted past a waiting one, before a slot is drained for it


@dataclass(slots=True, eq=False)
class AdapterLine:
    """The sequences that wait for one adapter."""

    digest: str
    queue: WaitingQueue = field(default_factory=WaitingQueue)  # by rank
    since: dict[int, int] = field(default_factory=dict)  # sequence id -> admissions when it was first set aside
    ranks: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # sequence id -> rank in the queue
    ages: list[tuple[int, int]] = field(default_factory=list)  # heap of (since, id); those gone stay until they surface
    is_urgent: bool = False  # owed at once, as its first sequence is better than all rows of a slot

    @property
    def oldest(self) -> tuple[int, int]:
        """(admissions when it was first set aside, id) of the sequence that has waited longest."""
        while self.ages[0][1] not in self.since:
            heapq.heappop(self.ages)
        return self.ages[0]

    @property
    def first(self) -> Sequence:
        """The sequence with the best rank."""
        first = self.queue.peek()
        assert first is not None, "a line without sequences is dropped"
        return first

    @property
    def rank(self) -> tuple[Any, ...]:
        """The best rank."""
        return self.ranks[self.first.sequence_id]


class AdapterLines:
    """Sets sequences aside whose adapter is not resident, and loads adapters for them.

    A slot that is empty or idle is loaded for the line whose first sequence has the best rank. A sequence that
    `MAX_PASSES` others were admitted past is *owed*: a slot drains for it, and lines with owed sequences go first. At
    most half of the slots drain at a time. So an owed sequence waits for one drain and the lines owed before its own.
    """

    def __init__(self, slots: AdapterSlots) -> None:
        self.slots = slots
        self.num_admitted = 0  # sequences, of adapters and of the base model
        self.has_news = False  # whether a sequence was set aside since the last `advance`
        self._num_waiting = 0
        self._lines: dict[str, AdapterLine] = {}
        self.max_draining = -(-len(slots.slots) // 2)

    def __len__(self) -> int:
        """Sequences that wait for an adapter."""
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for line in self._lines.values() for sequence in line.queue)

    def digests(self) -> list[str]:
        """The adapters that sequences wait for."""
        return list(self._lines)

    @property
    def num_owed(self) -> int:
        """Sequences past which so many were admitted that a slot is drained for them."""
        bound = self._bound
        return sum(since <= bound for line in self._lines.values() for since in line.since.values())

    @property
    def _bound(self) -> int:
        """A sequence set aside at this number of admissions, or before, is owed."""
        return self.num_admitted - MAX_PASSES

    def add(self, sequence: Sequence, rank: tuple[Any, ...]) -> None:
        """Sets a waiting sequence aside."""
        self.has_news = True
        self._num_waiting += 1
        line = self._lines.setdefault(sequence.adapter, AdapterLine(sequence.adapter))
        self.slots.forget(sequence.adapter, sequence.sequence_id)
        line.queue.push(sequence, rank)
        if sequence.set_aside_at < 0:
            sequence.set_aside_at = self.num_admitted
        line.since[sequence.sequence_id] = sequence.set_aside_at
        heapq.heappush(line.ages, (sequence.set_aside_at, sequence.sequence_id))
        line.ranks[sequence.sequence_id] = rank

    def remove(self, sequence: Sequence) -> bool:
        """Removes a waiting sequence that ended or was parked; False if it does not wait here but in the queue."""
        line = self._lines.get(sequence.adapter)
        if line is None or sequence.sequence_id not in line.since:
            self.slots.forget(sequence.adapter, sequence.sequence_id)
            return False
        self._num_waiting -= 1
        line.queue.remove(sequence)
        del line.since[sequence.sequence_id], line.ranks[sequence.sequence_id]
        line.is_urgent = False
        if not line.since:
            del self._lines[sequence.adapter]
        return True

    def take(self, digest: str) -> list[Sequence]:
        """Removes the line of an adapter that is resident now, and returns its sequences by rank.

        The slot is kept until the first and the oldest of them have run, or have gone.
        """
        line = self._lines.pop(digest, None)
        if line is None:
            return []
        self._promise(line)
        self._num_waiting -= len(line.since)
        sequences = []
        while line.queue.peek() is not None:
            sequences.append(line.queue.pop())
        return sequences

    def note_done(self, step: int, failed: Iterable[str]) -> list[Sequence]:
        """A step is done, without these loads. Returns the sequences that waited for them."""
        self.slots.note_failed(step, failed)
        self.slots.note_done(step)
        return [sequence for digest in failed if digest in self._lines for sequence in self._lines[digest].queue]

    def note_void(self, step: int) -> None:
        """A granted step was void: its loads are planned again for the lines that are left."""
        self.slots.note_void(step, self._lines)

    def join(self, sequence: Sequence) -> None:
        """A sequence gets a slot: counts it, and gives it the slot of its adapter, which is resident."""
        self.num_admitted += 1
        sequence.set_aside_at = -1
        if sequence.adapter:
            sequence.adapter_slot = self.slots.join(sequence.adapter, sequence.sequence_id)

    @property
    def needs_advance(self) -> bool:
        """Whether `advance` has anything to do."""
        return bool(self._lines) or self.slots.num_draining > 0

    def advance(self, completed_step: int, last_granted: int, num_left: Callable[[], Mapping[int, int]]) -> list[str]:
        """Loads and drains slots for the lines. Returns the adapters whose lines may run: see `take`.

        `num_left` counts the tokens that the rows of each slot have left, by its number.
        """
        self.has_news = False
        for line in self._lines.values():
            if self.slots.may_join(line.digest):
                self._promise(line)
        blocked = self._blocked()
        blocked.sort(key=lambda line: (0, line.oldest) if self._is_owed(line) else (1, line.rank))
        while blocked and (slot := self.slots.find_unused(completed_step, last_granted)) is not None:
            line = blocked.pop(0)
            if (own := self.slots.of(line.digest)) is not None:  # it drains: with a slot for the others, it need not
                self.slots.stop_drain(own)
                self._promise(line)
            else:
                self.slots.load(slot, line.digest)
        num_wanted = min(sum(self._is_owed(line) for line in blocked), self.max_draining)
        self.slots.stop_drains(num_wanted)
        while self.slots.num_draining < num_wanted and (slot := self.slots.find_to_drain(num_left())) is not None:
            self.slots.drain(slot)
        return [digest for digest in self._lines if self.slots.may_join(digest)]

    def check(self, running: Iterable[Sequence]) -> None:
        """Raises AssertionError unless the slots are held by the running sequences."""
        self.slots.check()
        held = Counter(sequence.adapter_slot for sequence in running if sequence.adapter_slot)
        assert held == +Counter({slot.number: slot.num_running for slot in self.slots.slots}), "adapter slots are held"
        assert self._num_waiting == sum(len(line.since) for line in self._lines.values())

    def first_blocked(self) -> AdapterLine | None:
        """The line with the best rank for which no slot loads or drains; None if there is none."""
        lines = [line for line in self._blocked() if not self._is_owed(line)]
        return min(lines, key=lambda line: line.rank, default=None)

    def _blocked(self) -> list[AdapterLine]:
        """The lines whose adapter has no slot, or one that drains."""
        lines, of = self._lines.values(), self.slots.of
        return [line for line in lines if (slot := of(line.digest)) is None or slot.state is AdapterState.DRAINING]

    def _promise(self, line: AdapterLine) -> None:
        self.slots.promise(line.digest, {line.first.sequence_id, line.oldest[1]})

    def _is_owed(self, line: AdapterLine) -> bool:
        return line.is_urgent or line.oldest[0] <= self._bound
