"""The scheduler's state of a sequence, with its state machine, and the waiting queue."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..messages import Ints, Started
from ..params import SamplingParams
from ..pooling_params import PoolingParams

MAX_PREEMPTIONS = 4  # a sequence preempted this often resumes only with all the blocks it may need, and is protected


class State(enum.Enum):
    """The state of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"  # holds a slot
    PREEMPTED = "preempted"  # lost its blocks; waits until no step in flight uses its slot
    SWAPPED = "swapped"  # waits to resume, with blocks on the host
    PARKED = "parked"  # not in the queue, as its client does not read; may have blocks on the host
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
    """One choice of one prompt. Owned by the scheduler from its arrival to its end."""

    sequence_id: int
    request_id: str
    token_ids: Ints  # [P + G] known tokens; while it runs, those at its start
    num_prompt: int  # P
    limit: int  # tokens, prompt plus answer; the last one is never computed
    params: SamplingParams
    seed: int
    priority: int
    cache_salt: str = ""
    num_expected_cached: int = 0  # tokens likely in the prefix cache at its start
    arrival_s: float = 0.0  # monotonic
    pooling: PoolingParams | None = None  # set: its answer counts as one token, which stands for a vector
    adapter: str = ""  # the digest of its adapter; "": the base model computes it
    adapter_slot: int = 0  # while it runs: where its adapter is; 0: the base model
    num_passes: int = 0  # sequences behind it that were admitted while it waited for its adapter; 0 while it runs
    state: State = State.WAITING
    slot: int = -1  # while running or preempted
    num_starts: int = 0  # times it got a slot
    num_preempted: int = 0  # for others; not as its rotary factors changed
    num_swapped: int = 0  # tokens on the host; 0 once copied back or given up
    swapped_step: int = -1  # the step that copies them to the host
    num_lost: int = 0  # tokens computed before a preemption and not yet recomputed
    lost_for: str = ""  # cause of the last preemption: "blocks", "slot", "adapter" or "rope"
    # Where rotary factors depend on the length, a short sequence stops running one token past its last short one, and
    # its keys and values are computed again with the other factors. Both are set at each start.
    is_long: bool = False
    run_limit: int = 0  # tokens up to which it runs in its slot; mostly `limit`
    is_parked: bool = False  # its client does not read: not served in any state
    ticket: int = 0  # of its valid entry in the waiting queue
    num_voids_alone: int = 0  # failed steps with only this sequence in them

    @property
    def is_protected(self) -> bool:
        """Whether it was preempted so often that it must not be again."""
        return self.num_preempted >= MAX_PREEMPTIONS

    def move(self, state: State) -> None:
        """Changes the state. Asserts that `TRANSITIONS` allows it."""
        assert state in TRANSITIONS[self.state], f"sequence {self.sequence_id} cannot go {self.state} -> {state}"
        self.state = state

    def started(self) -> Started:
        """The message that tells later stages to run it in its slot."""
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
            self.is_long,
            adapter=self.adapter,
            adapter_slot=self.adapter_slot,
        )


class WaitingQueue:
    """A priority queue of sequences, lowest rank first.

    Removed entries stay in the heap until they surface.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[Any, ...], int, int, Sequence]] = []  # (rank, id, ticket, sequence)
        self._num_gone = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_gone

    def push(self, sequence: Sequence, rank: tuple[Any, ...]) -> None:
        """Adds a sequence. Its rank is fixed while it waits."""
        sequence.ticket += 1
        heapq.heappush(self._heap, (rank, sequence.sequence_id, sequence.ticket, sequence))

    def peek(self) -> Sequence | None:
        """The first sequence, or None."""
        while self._heap and not _is_there(self._heap[0]):
            heapq.heappop(self._heap)
            self._num_gone -= 1
        return self._heap[0][-1] if self._heap else None

    def pop(self) -> Sequence:
        """Removes and returns the first sequence. Asserts that there is one."""
        first = self.peek()
        assert first is not None
        heapq.heappop(self._heap)
        first.ticket += 1
        return first

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence from any position."""
        sequence.ticket += 1
        self._num_gone += 1
        if self._num_gone > 64 and self._num_gone > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if _is_there(entry)]
            heapq.heapify(self._heap)
            self._num_gone = 0

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[-1] for entry in self._heap if _is_there(entry))

    def in_order(self) -> list[Sequence]:
        """All sequences, sorted by rank."""
        return [entry[-1] for entry in sorted(self._heap) if _is_there(entry)]


def _is_there(entry: tuple[tuple[Any, ...], int, int, Sequence]) -> bool:
    return entry[-1].ticket == entry[-2]
