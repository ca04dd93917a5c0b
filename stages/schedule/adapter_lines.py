"""The sequences that wait for the device slot of their adapter, one line an adapter, and who gets a slot next.

Plain code behind the schedule stage. Sequences of other adapters and of the base model pass them in the meantime.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .adapter_slots import AdapterSlot, AdapterSlots, AdapterState
from .pass_counts import Key, PassCounts
from .sequence import Sequence, WaitingQueue

MAX_PASSES = 50  # sequences admitted past one that waits, before a slot drains for it or those behind it wait too


@dataclass(slots=True, eq=False)
class AdapterLine:
    """The sequences that wait for one adapter."""

    digest: str
    queue: WaitingQueue = field(default_factory=WaitingQueue)  # by rank
    keys: dict[int, Key] = field(default_factory=dict)  # by sequence id

    @property
    def key(self) -> Key:
        """The place of the sequence with the best rank."""
        return self.keys[self.first.sequence_id]

    @property
    def first(self) -> Sequence:
        """The sequence with the best rank."""
        first = self.queue.peek()
        assert first is not None, "a line without sequences is dropped"
        return first


class AdapterLines:
    """Sets sequences aside whose adapter is not resident, and loads adapters for them.

    A slot that is empty or idle is loaded for the line whose first sequence has the best rank. A sequence is *owed*
    once `max_passes` sequences that rank behind it were admitted. Then a slot drains for its line, and the slot that is
    drained first is loaded for the line whose drain began first. Where no slot is left to drain, no sequence behind it
    is admitted until one is. So past any sequence at most `max_passes` others are admitted, and those that are admitted
    during the one drain for it. Sequences that rank ahead of it and come later may go first: they do not pass it.
    """

    def __init__(self, slots: AdapterSlots, max_passes: float = MAX_PASSES) -> None:
        """With `max_passes` of infinity no slot drains, and a sequence may be passed forever."""
        self.slots = slots
        self.max_passes = max_passes
        self.has_news = False  # whether a sequence was set aside since the last `advance`
        # called when a sequence is set aside (True), and when its line is taken (False)
        self.on_aside: Callable[[Sequence, bool], object] | None = None
        self.drained_for: list[str] = []  # digests, in the order in which their drains began
        self._passes = PassCounts()
        self._lines: dict[str, AdapterLine] = {}

    def __len__(self) -> int:
        """Sequences that wait for an adapter."""
        return len(self._passes)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for line in self._lines.values() for sequence in line.queue)

    def digests(self) -> list[str]:
        """The adapters that sequences wait for."""
        return list(self._lines)

    def num_waiting(self, digest: str) -> int:
        """Sequences that wait for an adapter."""
        line = self._lines.get(digest)
        return 0 if line is None else len(line.keys)

    @property
    def num_owed(self) -> int:
        """Sequences past which so many were admitted that a slot is drained for them."""
        return self._passes.num_past(self.max_passes)

    # -- sequences

    def add(self, sequence: Sequence, rank: tuple[Any, ...]) -> None:
        """Sets a waiting sequence aside."""
        self.has_news = True
        key = (rank, sequence.sequence_id)
        line = self._lines.setdefault(sequence.adapter, AdapterLine(sequence.adapter))
        self.slots.forget(sequence.adapter, sequence.sequence_id)
        line.queue.push(sequence, rank)
        line.keys[sequence.sequence_id] = key
        self._passes.add(sequence, key)
        if self.on_aside is not None:
            self.on_aside(sequence, True)

    def remove(self, sequence: Sequence) -> bool:
        """Removes a waiting sequence that ended or was parked; False if it does not wait here but in the queue."""
        line = self._lines.get(sequence.adapter)
        if line is None or sequence.sequence_id not in line.keys:
            self.slots.forget(sequence.adapter, sequence.sequence_id)
            return False
        line.queue.remove(sequence)
        self._passes.remove(line.keys.pop(sequence.sequence_id))
        if not line.keys:
            del self._lines[sequence.adapter]
        return True

    def take(self, digest: str) -> list[Sequence]:
        """Removes the line of an adapter that is resident now, and returns its sequences by rank.

        The slot is kept until the first of them and the owed ones have run, or have gone.
        """
        line = self._lines.pop(digest, None)
        if line is None:
            return []
        self._promise(line)
        sequences = []
        while line.queue.peek() is not None:
            sequence = line.queue.pop()
            self._passes.remove(line.keys[sequence.sequence_id])
            sequences.append(sequence)
            if self.on_aside is not None:
                self.on_aside(sequence, False)
        return sequences

    def join(self, sequence: Sequence, rank: tuple[Any, ...]) -> None:
        """A sequence gets a slot: counts it, and gives it the slot of its adapter, which is resident."""
        sequence.num_passes = 0
        if self._lines:
            self._passes.note_admitted((rank, sequence.sequence_id))
        if sequence.adapter:
            sequence.adapter_slot = self.slots.join(sequence.adapter, sequence.sequence_id)

    def holds_back(self, sequence: Sequence, rank: tuple[Any, ...]) -> bool:
        """Whether a sequence may not be admitted, as it would pass one that is owed and that no slot drains for."""
        unserved = self._first_unserved()
        return unserved is not None and (rank, sequence.sequence_id) > unserved

    # -- steps

    def note_done(self, step: int, failed: Iterable[str]) -> list[Sequence]:
        """A step is done, without these loads. Returns the sequences that waited for them."""
        self.slots.note_failed(step, failed)
        self.slots.note_done(step)
        return [sequence for digest in failed if digest in self._lines for sequence in self._lines[digest].queue]

    def note_void(self, step: int) -> None:
        """A granted step was void: its loads are planned again for the lines that are left."""
        self.slots.note_void(step, self._lines)

    # -- slots

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
        self._load_unused(completed_step, last_granted)
        self._drain(num_left)
        unserved = self._first_unserved()
        if unserved is not None and self.slots.break_promises(unserved):  # to sequences that it holds back
            self._load_unused(completed_step, last_granted)
            self._drain(num_left)
        return [digest for digest in self._lines if self.slots.may_join(digest)]

    def drain_for(self, line: AdapterLine, slot: AdapterSlot) -> None:
        """Drains a slot for a line that goes before those for which slots drain already."""
        self.drained_for.insert(0, line.digest)
        self.slots.drain(slot)

    def is_served(self, digest: str) -> bool:
        """Whether a slot holds or loads an adapter, or drains for it."""
        return not self._is_blocked(digest) or digest in self.drained_for

    def first_drained_for(self) -> Sequence | None:
        """The sequence that gets the slot which is drained first; None if none drains."""
        return next((self._lines[digest].first for digest in self.drained_for if digest in self._lines), None)

    def first_blocked(self) -> AdapterLine | None:
        """The line with the best rank for which no slot loads or drains; None if there is none."""
        lines = (line for line in self._lines.values() if not self.is_served(line.digest))
        return min(lines, key=lambda line: line.key, default=None)

    def check(self, running: Iterable[Sequence]) -> None:
        """Raises AssertionError unless the slots are held by the running sequences."""
        self.slots.check()
        held = Counter(sequence.adapter_slot for sequence in running if sequence.adapter_slot)
        assert held == +Counter({slot.number: slot.num_running for slot in self.slots.slots}), "adapter slots are held"
        assert len(self._passes) == sum(len(line.keys) for line in self._lines.values())

    def _load_unused(self, completed_step: int, last_granted: int) -> None:
        """Loads slots that no row uses: for lines with a drain, then for owed ones, then by rank."""
        self.drained_for = [each for each in self.drained_for if each in self._lines and self._is_blocked(each)]
        owed = [*self.drained_for, *self._unserved()]
        rest = (line for line in self._lines.values() if self._is_blocked(line.digest) and line.digest not in owed)
        blocked = [*owed, *(line.digest for line in sorted(rest, key=lambda line: line.key))]
        while blocked and (slot := self.slots.find_unused(completed_step, last_granted)) is not None:
            digest = blocked.pop(0)
            if (own := self.slots.of(digest)) is not None:  # it drains: with a slot for the others, it need not
                self.slots.stop_drain(own)
                self._promise(self._lines[digest])
            else:
                self.slots.load(slot, digest)
        self.drained_for = [digest for digest in self.drained_for if self._is_blocked(digest)]

    def _drain(self, num_left: Callable[[], Mapping[int, int]]) -> None:
        """Drains a slot for each line with an owed sequence, as long as there are slots to drain."""
        for digest in self._unserved():
            if len(self.drained_for) >= self.slots.num_draining:
                slot = self.slots.find_to_drain(num_left())
                if slot is None:
                    break
                self.slots.drain(slot)
            self.drained_for.append(digest)
        self.slots.stop_drains(len(self.drained_for))

    def _promise(self, line: AdapterLine) -> None:
        """Keeps the adapter of a line for its first sequence, and for the owed ones."""
        owed = (key for key, sequence in self._passes.most_passed(self.max_passes) if sequence.adapter == line.digest)
        self.slots.promise(line.digest, [line.key, *owed])

    def _is_blocked(self, digest: str) -> bool:
        """Whether an adapter has no slot, or one that drains."""
        slot = self.slots.of(digest)
        return slot is None or slot.state is AdapterState.DRAINING

    def _unserved(self) -> list[str]:
        """The adapters of owed sequences for which no slot loads or drains, by rank."""
        owed = (sequence.adapter for _, sequence in self._passes.most_passed(self.max_passes))
        return [digest for digest in dict.fromkeys(owed) if not self.is_served(digest)]

    def _first_unserved(self) -> Key | None:
        """The place of the first owed sequence for which no slot loads or drains; None if there is none."""
        owed = self._passes.most_passed(self.max_passes)
        return next((key for key, sequence in owed if not self.is_served(sequence.adapter)), None)
