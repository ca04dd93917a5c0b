"""A sequence as schedule knows it, from its arrival to its end, and the line in which it waits.

Plain state behind the schedule stage. Knows no policy and no memory.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..messages import Ints, Started
from ..params import SamplingParams
from ..pooling_params import PoolingParams

MAX_PREEMPTIONS = 4  # a sequence preempted this often comes back only with all it may need, and is no victim again


class State(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"  # holds a slot
    PREEMPTED = "preempted"  # lost its blocks; waits for the steps in flight that still know its slot
    SWAPPED = "swapped"  # waits to come back, with blocks on the host
    PARKED = "parked"  # not in line, as its client does not read; perhaps with blocks on the host
    OVER = "over"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.PARKED, State.OVER}),
    State.RUNNING: frozenset({State.PREEMPTED, State.OVER}),
    State.PREEMPTED: frozenset({State.WAITING, State.SWAPPED, State.PARKED, State.OVER}),
    State.SWAPPED: frozenset({State.RUNNING, State.WAITING, State.PARKED, State.OVER}),
    State.PARKED: frozenset({State.WAITING, State.SWAPPED, State.OVER}),
    State.OVER: frozenset(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and one of its choices. Owned by schedule, for its whole life."""

    sequence_id: int
    request_id: str
    token_ids: Ints  # [P + G] known tokens; while it runs, those it started with
    num_prompt: int  # P
    limit: int  # tokens of prompt and answer together; the last one is never computed
    params: SamplingParams
    seed: int
    priority: int
    cache_salt: str = ""
    num_expected_cached: int = 0  # tokens that are likely found when it starts
    arrival_s: float = 0.0  # monotonic
    pooling: PoolingParams | None = None  # its answer is one token, which stands for a vector
    state: State = State.WAITING
    slot: int = -1  # while running or preempted
    num_starts: int = 0  # how often it got a slot
    num_preempted: int = 0
    num_swapped: int = 0  # tokens on the host, until they are copied back or given up
    swapped_step: int = -1  # in which they are copied there
    num_lost: int = 0  # tokens that were computed before a preemption and have not been again
    lost_for: str = ""  # what it was preempted for last: "blocks" or "slot"
    is_parked: bool = False  # its client does not read: it is not served, whatever its state
    ticket: int = 0  # its place in the line is the one that it took last
    num_voids_alone: int = 0  # steps that failed with no other sequence in them

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
            self.pooling,
        )


class WaitingQueue:
    """Sequences in line, the one of the lowest rank first. Those that have left it are skipped and forgotten."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[Any, ...], int, int, Sequence]] = []  # (rank, id, ticket, sequence)
        self._num_gone = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_gone

    def push(self, sequence: Sequence, rank: tuple[Any, ...]) -> None:
        """Adds a sequence; where it stands does not change while it waits."""
        sequence.ticket += 1
        heapq.heappush(self._heap, (rank, sequence.sequence_id, sequence.ticket, sequence))

    def peek(self) -> Sequence | None:
        """The first in line, or None."""
        while self._heap and not _is_there(self._heap[0]):
            heapq.heappop(self._heap)
            self._num_gone -= 1
        return self._heap[0][-1] if self._heap else None

    def pop(self) -> Sequence:
        """Takes the first in line; there must be one."""
        first = self.peek()
        assert first is not None
        heapq.heappop(self._heap)
        first.ticket += 1
        return first

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it stands."""
        sequence.ticket += 1
        self._num_gone += 1
        if self._num_gone > 64 and self._num_gone > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if _is_there(entry)]
            heapq.heapify(self._heap)
            self._num_gone = 0

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[-1] for entry in self._heap if _is_there(entry))

    def in_order(self) -> list[Sequence]:
        """All of them, first to be served first."""
        return [entry[-1] for entry in sorted(self._heap) if _is_there(entry)]


def _is_there(entry: tuple[tuple[Any, ...], int, int, Sequence]) -> bool:
    return entry[-1].ticket == entry[-2]
