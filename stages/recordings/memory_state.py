"""The memory of a running engine or a replayed recording at one moment, by block and holder.

Plain data, copied from the state of schedule and allocate. Equal moments give equal values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..allocate.allocator import Allocator
from ..allocate.tiers.block_pool import BlockPool, BlockState
from ..schedule.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class SequenceState:
    """One sequence that has not ended."""

    sequence_id: int
    request_id: str
    state: str  # waiting, running, preempted, swapped, parked
    is_parked: bool  # its client does not read, whatever the state
    num_prompt: int  # tokens
    num_known: int  # tokens of prompt and answer
    num_preempted: int
    priority: int


@dataclass(frozen=True, slots=True)
class Holder:
    """One slot that has blocks.

    Its sequence may have ended for schedule before allocate is notified.
    """

    slot: int
    sequence_id: int
    num_tokens: int  # with a place in the blocks
    blocks: tuple[int, ...]  # in token order; other slots may share them
    more_blocks: tuple[tuple[int, ...], ...] = ()  # those of each kind of memory after the first


@dataclass(frozen=True, slots=True)
class PoolState:
    """The blocks of one memory."""

    block_states: bytes  # [N] a BlockState each
    num_tables: bytes  # [N] number of holders; 255 for 255 or more

    @classmethod
    def of(cls, pool: BlockPool) -> PoolState:
        """The current state of a pool."""
        return cls(pool.state.tobytes(), np.minimum(pool.num_tables, 255).astype(np.uint8).tobytes())

    def count(self, state: BlockState) -> int:
        """The number of blocks in that state."""
        return self.block_states.count(int(state))


@dataclass(frozen=True, slots=True)
class KindState:
    """The blocks of one kind of memory after the first. Those of slabs that it does not have are absent."""

    name: str
    device: PoolState
    host: PoolState | None


@dataclass(frozen=True, slots=True)
class MemoryState:
    """All memory, and all sequences that use it or wait for it."""

    last_granted: int  # step
    completed_step: int
    device: PoolState
    host: PoolState | None  # None: there is no host tier
    holders: tuple[Holder, ...]  # by slot
    swapped: tuple[tuple[int, tuple[int, ...]], ...]  # (sequence, its blocks on the host)
    sequences: tuple[SequenceState, ...]  # by id
    admission_blocked_reason: str  # what the first request in the queue lacks: blocks, swapped, or ""
    more_kinds: tuple[KindState, ...] = ()  # of memory, after the first, which the fields above have

    def holders_of(self, block: int, kind: int = 0) -> list[Holder]:
        """The slots that hold a block of the device, of a kind of memory."""
        if kind:
            return [holder for holder in self.holders if block in holder.more_blocks[kind - 1]]
        return [holder for holder in self.holders if block in holder.blocks]


def memory_state(scheduler: Scheduler, allocator: Allocator) -> MemoryState:
    """The current memory.

    Call it between two calls of the stages: during one their states do not agree.
    """
    tables, host, table = allocator.tables, allocator.host, scheduler.slots
    holders = []
    for slot in np.flatnonzero(tables.capacity).tolist():
        held = tables.held_by(slot)
        more = tuple(tuple(each.tables.held_by(slot).tolist()) for each in allocator.kinds[1:])
        sequence_id = int(allocator.sequence_ids[slot])
        holders.append(Holder(slot, sequence_id, int(tables.num_tokens[slot]), tuple(held.tolist()), more))
    sequences = []
    for sequence_id, sequence in sorted(scheduler.sequences.items()):
        num_known = int(table.num_known[sequence.slot]) if sequence.slot >= 0 else len(sequence.token_ids)
        args = (sequence.request_id, sequence.state.value, sequence.is_parked, sequence.num_prompt)
        sequences.append(SequenceState(sequence_id, *args, num_known, sequence.num_preempted, sequence.priority))
    return MemoryState(
        last_granted=scheduler.last_granted,
        completed_step=scheduler.completed_step,
        device=PoolState.of(allocator.pool),
        host=None if host is None else PoolState.of(host.with_memory[0]),
        holders=tuple(holders),
        swapped=()
        if host is None
        else tuple((key, tuple(host.blocks_with_memory(key).tolist())) for key in host.sequence_ids()),
        sequences=tuple(sequences),
        admission_blocked_reason=scheduler.admission_blocked_reason,
        more_kinds=_more_kinds(allocator),
    )


def _more_kinds(allocator: Allocator) -> tuple[KindState, ...]:
    layout, host = allocator.layout, allocator.host
    if layout is None:
        return ()
    pools = [None] * len(allocator.kinds) if host is None else list(host.with_memory)
    rows = list(zip(layout.kinds, allocator.kinds, pools, strict=True))[1:]
    return tuple(
        KindState(kind.name, PoolState.of(each.pool), None if pool is None else PoolState.of(pool))
        for kind, each, pool in rows
    )
