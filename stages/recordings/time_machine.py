"""The memory of a recorded engine at any time: who held which block, and why who was preempted.

A recording says what happened, not what the books looked like; so it is run again up to the moment that is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..policy import Policy
from .memory_state import MemoryState, memory_state
from .recorded import AllocateCall, Call, Recording, RecordingError, ScheduleCall
from .recording import Fields
from .replay import Decision, Replay


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


class TimeMachine:
    """A recording to be looked at, moment by moment. Going forward costs what lies between, going back begins anew.

    Raises `RecordingError` for what can not be read or run.
    """

    def __init__(self, recording: Recording, policy: Policy | None = None) -> None:
        self.recording = recording
        self._policy = policy
        self._begin()

    def at(self, time_s: float) -> Moment:
        """The engine at `time_s` seconds since the recording began; at its end for any time behind that."""
        if time_s < self._replay.time_s:
            self._begin()
        while self._next is not None and self._next.time_s <= time_s:
            self._step()
        core = self._replay.core
        memory = memory_state(core.schedule.scheduler, core.allocate.allocator)
        return Moment(self._done_s, memory, tuple(self._preemptions))

    def times(self) -> Iterator[float]:
        """The times of all calls, in order, for a bar to scrub along."""
        return (call.time_s for call in self.recording)

    # -- running

    def _begin(self) -> None:
        self._replay = Replay(self.recording, self._policy)
        self._upcoming = iter(self.recording)
        self._next: Call | None = next(self._upcoming, None)
        self._calls = self._replay.calls()
        self._done_s = 0.0
        self._preemptions: list[Preemption] = []
        self._taken: dict[int, tuple[str, tuple[int, ...]]] = {}  # slot -> (cause, for whom), until allocate was told

    def _step(self) -> None:
        call, decisions = next(self._calls)
        self._next, self._done_s = next(self._upcoming, None), call.time_s
        if self._replay.difference is not None:
            where = f"{self.recording.path}: the stages decide differently now, and what comes then can not be rebuilt"
            raise RecordingError(f"{where}: {self._replay.difference}")
        if isinstance(call, ScheduleCall):
            self._note_taken(decisions)
        elif isinstance(call, AllocateCall):
            self._note_preempted(call, decisions)

    def _note_taken(self, decisions: Sequence[Decision]) -> None:
        """Slots that schedule took."""
        scheduler = self._replay.core.schedule.scheduler
        for plan in _replayed(decisions, "plan"):
            for slot in plan["preempted"]:
                sequence, first = scheduler.slots.sequences[slot], scheduler.waiting.peek()
                cause = "slot" if sequence is None else "parked" if sequence.is_parked else sequence.lost_for
                self._taken[slot] = cause, () if first is None else (first.sequence_id,)

    def _note_preempted(self, call: AllocateCall, decisions: Sequence[Decision]) -> None:
        ids = self._replay.core.allocate.allocator.sequence_ids
        for report, grant in zip(_replayed(decisions, "report"), _replayed(decisions, "grant"), strict=True):
            served = () if not grant else tuple(dict.fromkeys(int(ids[slot]) for slot in grant["table_slots"]))
            for slot, (cause, whom) in self._taken.items():
                self._preemptions.append(self._preemption(call, report, slot, cause, whom))
            self._taken.clear()
            for slot in report["preempted"]:
                self._preemptions.append(self._preemption(call, report, slot, "blocks", served))

    def _preemption(
        self, call: AllocateCall, report: Fields, slot: int, cause: str, whom: tuple[int, ...]
    ) -> Preemption:
        core = self._replay.core
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
