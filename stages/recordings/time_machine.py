"""The memory of a recorded engine at any time, with the cause of each preemption.

A recording has inputs and decisions, not the stages' state. So the state at a time is rebuilt by a replay up to it.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..schedule.policy import Policy
from .field_values import Fields
from .memory_state import MemoryState, memory_state
from .reader import AllocateCall, Call, Recording, RecordingError, RecordingReader, ScheduleCall
from .recorded_engine import RecordedEngine
from .replay import Decision, Replay, ReplayedCore

WHY = {
    "blocks": "blocks ran out",
    "slot": "its slot was needed",
    "adapter": "a better request needed the place of its adapter",
    "rope": "it got longer than its rotary factors are for",
}
MARK_CALLS = 128  # between two marks, at first
MAX_MARKS, MAX_MARK_BYTES = 64, 2**29


@dataclass(frozen=True, slots=True)
class Preemption:
    """A sequence that lost its blocks."""

    time_s: float
    step: int
    sequence_id: int
    request_id: str  # "" if it ended meanwhile
    how: str  # swap or recompute
    # blocks: they ran out; slot: a better sequence waited for it; adapter: one waited for its adapter; parked:
    # its client did not read; rope: it got longer than its rotary factors are for
    cause: str
    num_tokens: int  # swapped to the host
    num_free: int  # blocks, after that plan
    # sequences that got blocks in that plan, or were first in the queue for its slot, or for the place of its adapter
    beneficiaries: tuple[int, ...]

    def __str__(self) -> str:
        names = ", ".join(str(sequence_id) for sequence_id in self.beneficiaries) or "no sequence yet"
        why = WHY.get(self.cause, "its client does not read")
        how = f"{self.num_tokens} tokens swapped to the host" if self.how == "swap" else "to be recomputed"
        what = "its adapter's place" if self.cause == "adapter" else "blocks"
        return f"step {self.step}: sequence {self.sequence_id} was preempted, {how}: {why}; {what} went to {names}"


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of a recorded engine after its last call at or before some time."""

    time_s: float  # of that call
    memory: MemoryState
    preemptions: tuple[Preemption, ...]  # up to now, oldest first


@dataclass(slots=True, eq=False)
class _Place:
    """A place in the replay of a recording."""

    replay: Replay
    reading: RecordingReader
    upcoming: Call | None  # read, but not run
    done_s: float = 0.0  # time of the last call that was run
    preemptions: list[Preemption] = field(default_factory=list)
    taken: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    # slot -> (cause, beneficiaries), until allocate is notified

    @property
    def num_calls(self) -> int:
        """The number of calls that were run."""
        return self.replay.num_calls

    def copy(self) -> _Place:
        """An independent copy, to continue from."""
        state = (self.done_s, list(self.preemptions), dict(self.taken))
        return _Place(self.replay.copy(), self.reading.copy(), self.upcoming, *state)


class Checkpoints:
    """Copies of places that the replay passed, to go back to.

    Evenly spread, however long the recording is.
    """

    def __init__(self, engine: RecordedEngine, spacing: int = MARK_CALLS) -> None:
        self._spacing = spacing  # calls between two, at least
        self._most = min(MAX_MARKS, max(4, MAX_MARK_BYTES // _place_bytes(engine)))
        self._places: list[_Place] = []  # in order

    def passed(self, place: _Place) -> None:
        """Keeps a copy of `place`, if the last one is far enough behind."""
        last = self._places[-1].num_calls if self._places else 0
        if place.num_calls - last < self._spacing:
            return
        self._places.append(place.copy())
        if len(self._places) > self._most:
            self._places = self._places[1::2]
            self._spacing *= 2

    def before(self, time_s: float) -> _Place | None:
        """The last place at or before `time_s`, to be copied; None if there is none."""
        number = bisect_right(self._places, time_s, key=lambda place: place.done_s)
        return self._places[number - 1] if number else None


def _place_bytes(engine: RecordedEngine) -> int:
    """The approximate size of a place in bytes: state of blocks, prefix cache and slots."""
    layout = engine.kv_layout
    num_blocks = engine.num_blocks if layout is None else sum(layout.num_blocks)
    num_blocks += engine.num_host_blocks + sum(engine.num_more_host_blocks)
    num_kinds = 1 if layout is None else len(layout.kinds)
    of_tables = 4 * num_kinds * engine.max_num_seqs * engine.max_model_len // engine.block_size
    return (1024 if engine.enable_prefix_caching else 32) * num_blocks + of_tables + 2**16


class TimeMachine:
    """A recording that can be inspected at any time.

    Going to a time replays what lies between it and the current place or the last mark before it. New marks are left on
    the way.

    `core` is a core of the caller's, which may trace. Raises `RecordingError` for what cannot be read or replayed.
    """

    def __init__(
        self,
        recording: Recording,
        policy: Policy | None = None,
        core: ReplayedCore | None = None,
        marks: Checkpoints | None = None,
    ) -> None:
        self.recording = recording
        self.marks = marks or Checkpoints(recording.engine)
        reading = RecordingReader(recording)
        self._begin = _Place(Replay(recording, policy), reading, next(reading, None))
        self._here = self._begin.copy()
        if core is not None:
            self._here.replay.core = core

    def another(self) -> TimeMachine:
        """A second one of the same recording, at its beginning. It shares the marks."""
        other = copy.copy(self)
        other._here = self._begin.copy()
        return other

    @property
    def core(self) -> ReplayedCore:
        """The stages in their current state. A different object after going back."""
        return self._here.replay.core

    @property
    def replay(self) -> Replay:
        """The replay so far."""
        return self._here.replay

    @property
    def preemptions(self) -> Sequence[Preemption]:
        """Up to now, oldest first."""
        return self._here.preemptions

    def at(self, time_s: float) -> Moment:
        """The state at `time_s` seconds since the recording began; after its end, the last state."""
        self.go(time_s)
        memory = memory_state(self.core.schedule.scheduler, self.core.allocate.allocator)
        return Moment(self._here.done_s, memory, tuple(self.preemptions))

    def go(self, time_s: float) -> None:
        """Goes to a time without building its `Moment`."""
        mark = self.marks.before(time_s) or self._begin
        if time_s < self._here.done_s or mark.num_calls > self._here.num_calls:
            self._here = mark.copy()
        for _ in self.calls(time_s):
            pass

    def calls(self, until_s: float = float("inf")) -> Iterator[tuple[Call, Sequence[Decision]]]:
        """Runs call by call, through those at or before `until_s`."""
        while (call := self._here.upcoming) is not None and call.time_s <= until_s:
            yield call, self._step(call)

    def times(self) -> Iterator[float]:
        """The times of all calls, in order, for a scrub bar."""
        return (call.time_s for call in self.recording)

    # -- running

    def _step(self, call: Call) -> Sequence[Decision]:
        here = self._here
        decisions = here.replay.take(call)
        if here.replay.difference is not None:
            where = f"{self.recording.path}: the stages decide differently now, so later calls cannot be replayed"
            raise RecordingError(f"{where}: {here.replay.difference}")
        here.upcoming, here.done_s = next(here.reading, None), call.time_s
        if isinstance(call, ScheduleCall):
            self._note_taken(decisions)
        elif isinstance(call, AllocateCall):
            self._note_preempted(call, decisions)
        self.marks.passed(here)
        return decisions

    def _note_taken(self, decisions: Sequence[Decision]) -> None:
        """Records the slots that schedule took from sequences."""
        scheduler = self.core.schedule.scheduler
        for plan in _replayed(decisions, "plan"):
            for slot in plan["preempted"]:
                sequence, first = scheduler.slots.sequences[slot], scheduler.waiting.peek()
                cause = "slot" if sequence is None else "parked" if sequence.is_parked else sequence.lost_for
                if cause == "adapter" and scheduler.adapters is not None:
                    first = scheduler.adapters.first_drained_for()
                self._here.taken[slot] = cause, () if first is None else (first.sequence_id,)

    def _note_preempted(self, call: AllocateCall, decisions: Sequence[Decision]) -> None:
        ids = self.core.allocate.allocator.sequence_ids
        for report, grant in zip(_replayed(decisions, "report"), _replayed(decisions, "grant"), strict=True):
            served = () if not grant else tuple(dict.fromkeys(int(ids[slot]) for slot in grant["table_slots"]))
            for slot, (cause, beneficiaries) in self._here.taken.items():
                self._here.preemptions.append(self._preemption(call, report, slot, cause, beneficiaries))
            self._here.taken.clear()
            for slot in report["preempted"]:
                self._here.preemptions.append(self._preemption(call, report, slot, "blocks", served))

    def _preemption(
        self, call: AllocateCall, report: Fields, slot: int, cause: str, beneficiaries: tuple[int, ...]
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
            beneficiaries=tuple(each for each in beneficiaries if each != sequence_id),
        )


def _replayed(decisions: Sequence[Decision], kind: str) -> list[Fields]:
    """The replayed decisions of a kind; {} for a missing grant."""
    return [decision.replayed or {} for decision in decisions if decision.kind == kind]
