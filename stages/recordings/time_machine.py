"""The memory of a recorded engine at any time: who held which block, and why who was preempted.

A recording says what happened, not what the books looked like; so it is run again up to the moment that is asked for.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..schedule.policy import Policy
from .format import Fields, RecordedEngine
from .memory_state import MemoryState, memory_state
from .reader import AllocateCall, Call, Reading, Recording, RecordingError, ScheduleCall
from .replay import Core, Decision, Replay

MARK_CALLS = 128  # between two places to go back to, at first
MAX_MARKS, MAX_MARK_BYTES = 64, 2**29


@dataclass(frozen=True, slots=True)
class Preemption:
    """A sequence that lost its blocks."""

    time_s: float
    step: int
    sequence_id: int
    request_id: str  # "" if it ended meanwhile
    how: str  # swap or recompute
    cause: str  # blocks: they ran out; slot: a better one wanted its place. Of a parked one: parked
    num_tokens: int  # that went to the host
    num_free: int  # blocks, after that plan
    beneficiaries: tuple[int, ...]  # sequences that got blocks in that plan, or were first in line for its slot

    def __str__(self) -> str:
        whom = ", ".join(str(sequence_id) for sequence_id in self.beneficiaries) or "nobody yet"
        why = {"blocks": "blocks ran out", "slot": "a better one waited"}.get(self.cause, "its client does not read")
        how = f"{self.num_tokens} tokens went to the host" if self.how == "swap" else "to be computed again"
        return f"step {self.step}: sequence {self.sequence_id} gave way, {how}: {why}; blocks went to {whom}"


@dataclass(frozen=True, slots=True)
class Moment:
    """A recorded engine after its last call at or before some time."""

    time_s: float  # of that call
    memory: MemoryState
    preemptions: tuple[Preemption, ...]  # up to now, oldest first


@dataclass(slots=True, eq=False)
class _Place:
    """How far a recording was run again, and what is to come."""

    replay: Replay
    reading: Reading
    upcoming: Call | None  # read and not run
    done_s: float = 0.0  # time of the last call that was run
    preemptions: list[Preemption] = field(default_factory=list)
    taken: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    # slot -> (cause, for whom), until allocate was told

    @property
    def num_calls(self) -> int:
        """That were run."""
        return self.replay.num_calls

    def copy(self) -> _Place:
        """The same place, to go on from by itself."""
        books = (self.done_s, list(self.preemptions), dict(self.taken))
        return _Place(self.replay.copy(), self.reading.copy(), self.upcoming, *books)


class Marks:
    """Places of a recording that were passed, to go back to: some evenly spread ones, however long it is."""

    def __init__(self, engine: RecordedEngine, spacing: int = MARK_CALLS) -> None:
        self._spacing = spacing  # calls between two, at least
        self._most = min(MAX_MARKS, max(4, MAX_MARK_BYTES // _place_bytes(engine)))
        self._places: list[_Place] = []  # in order

    def passed(self, place: _Place) -> None:
        """Keeps a copy, if the last one is far behind."""
        last = self._places[-1].num_calls if self._places else 0
        if place.num_calls - last < self._spacing:
            return
        self._places.append(place.copy())
        if len(self._places) > self._most:
            self._places = self._places[1::2]
            self._spacing *= 2

    def before(self, time_s: float) -> _Place | None:
        """The last one that is no later, to be copied; None if there is none."""
        number = bisect_right(self._places, time_s, key=lambda place: place.done_s)
        return self._places[number - 1] if number else None


def _place_bytes(engine: RecordedEngine) -> int:
    """About what a place takes: the books of blocks, of the prefix cache and of the slots."""
    num_blocks = engine.num_blocks + engine.num_host_blocks
    of_tables = 4 * engine.max_num_seqs * engine.max_model_len // engine.block_size
    return (1024 if engine.enable_prefix_caching else 32) * num_blocks + of_tables + 2**16


class TimeMachine:
    """A recording to be looked at, moment by moment. Going anywhere costs what lies between it and here, or the last
    mark before it; marks are left where nobody has been.

    `core` is an own one, which may trace. Raises `RecordingError` for what can not be read or run.
    """

    def __init__(
        self, recording: Recording, policy: Policy | None = None, core: Core | None = None, marks: Marks | None = None
    ) -> None:
        self.recording = recording
        self.marks = marks or Marks(recording.engine)
        reading = Reading(recording)
        self._begin = _Place(Replay(recording, policy), reading, next(reading, None))
        self._here = self._begin.copy()
        if core is not None:
            self._here.replay.core = core

    def another(self) -> TimeMachine:
        """One of the same recording, at its begin, which goes its own way by the same marks."""
        other = copy.copy(self)
        other._here = self._begin.copy()
        return other

    @property
    def core(self) -> Core:
        """The stages as they are now. Another one after going back."""
        return self._here.replay.core

    @property
    def replay(self) -> Replay:
        """How it has gone so far."""
        return self._here.replay

    @property
    def preemptions(self) -> Sequence[Preemption]:
        """Up to now, oldest first."""
        return self._here.preemptions

    def at(self, time_s: float) -> Moment:
        """The engine at `time_s` seconds since the recording began; at its end for any time behind that."""
        self.go(time_s)
        memory = memory_state(self.core.schedule.scheduler, self.core.allocate.allocator)
        return Moment(self._here.done_s, memory, tuple(self.preemptions))

    def go(self, time_s: float) -> None:
        """Goes there, and looks at nothing."""
        mark = self.marks.before(time_s) or self._begin
        if time_s < self._here.done_s or mark.num_calls > self._here.num_calls:
            self._here = mark.copy()
        for _ in self.calls(time_s):
            pass

    def calls(self, until_s: float = float("inf")) -> Iterator[tuple[Call, Sequence[Decision]]]:
        """Goes on call by call, through those at or before that time."""
        while (call := self._here.upcoming) is not None and call.time_s <= until_s:
            yield call, self._step(call)

    def times(self) -> Iterator[float]:
        """The times of all calls, in order, for a bar to scrub along."""
        return (call.time_s for call in self.recording)

    # -- running

    def _step(self, call: Call) -> Sequence[Decision]:
        here = self._here
        decisions = here.replay.take(call)
        if here.replay.difference is not None:
            where = f"{self.recording.path}: the stages decide differently now, and what comes then can not be rebuilt"
            raise RecordingError(f"{where}: {here.replay.difference}")
        here.upcoming, here.done_s = next(here.reading, None), call.time_s
        if isinstance(call, ScheduleCall):
            self._note_taken(decisions)
        elif isinstance(call, AllocateCall):
            self._note_preempted(call, decisions)
        self.marks.passed(here)
        return decisions

    def _note_taken(self, decisions: Sequence[Decision]) -> None:
        """Slots that schedule took."""
        scheduler = self.core.schedule.scheduler
        for plan in _replayed(decisions, "plan"):
            for slot in plan["preempted"]:
                sequence, first = scheduler.slots.sequences[slot], scheduler.waiting.peek()
                cause = "slot" if sequence is None else "parked" if sequence.is_parked else sequence.lost_for
                self._here.taken[slot] = cause, () if first is None else (first.sequence_id,)

    def _note_preempted(self, call: AllocateCall, decisions: Sequence[Decision]) -> None:
        ids = self.core.allocate.allocator.sequence_ids
        for report, grant in zip(_replayed(decisions, "report"), _replayed(decisions, "grant"), strict=True):
            served = () if not grant else tuple(dict.fromkeys(int(ids[slot]) for slot in grant["table_slots"]))
            for slot, (cause, whom) in self._here.taken.items():
                self._here.preemptions.append(self._preemption(call, report, slot, cause, whom))
            self._here.taken.clear()
            for slot in report["preempted"]:
                self._here.preemptions.append(self._preemption(call, report, slot, "blocks", served))

    def _preemption(
        self, call: AllocateCall, report: Fields, slot: int, cause: str, whom: tuple[int, ...]
    ) -> Preemption:
        core = self.core
        sequence_id = int(core.allocate.allocator.sequence_ids[slot])
        sequence = core.schedule.scheduler.sequences.get(sequence_id)
        num_tokens = dict(map(tuple, report["swapped"])).get(slot, 0)
        return Preemption(
            time_s=call.time_s,
            step=report["step"],
            sequence_id=sequence_id,
            request_id="" if sequence is None else sequence.request_id,
            how="swap" if num_tokens else "recompute",
            cause="parked" if sequence is not None and sequence.is_parked else cause,
            num_tokens=num_tokens,
            num_free=report["num_free"],
            beneficiaries=tuple(each for each in whom if each != sequence_id),
        )


def _replayed(decisions: Sequence[Decision], kind: str) -> list[Fields]:
    """What was decided of a kind; {} for a grant that there was none of."""
    return [decision.replayed or {} for decision in decisions if decision.kind == kind]
