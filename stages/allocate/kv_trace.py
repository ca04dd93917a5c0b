"""Trace records of KV block ownership: only changes, as ranges of blocks.

All records together give each block's state. A step that needs no new blocks writes nothing. The new blocks of decode
steps are written a few steps later, under the step that allocated them, and before any later record.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...runtime.stage import Context
from ...runtime.trace.tracer import NO_SLOT, EventKind
from ..messages import NO_INDICES, Indices, Ints, PlanReport, StepGrant, StepPlan
from .allocator import Allocator
from .tiers.block_pool import BlockState

PLANS_AT_ONCE = 16  # plans whose new blocks are written together, which takes a quarter of the time


class KVTrace:
    """Traces the blocks of `allocator`. Call `served` after each plan, in order."""

    def __init__(self, context: Context, allocator: Allocator) -> None:
        self._tracer, self._source = context.tracer, context.source
        self._allocator = allocator
        self._state_names = [context.tracer.source(state.name.lower()) for state in BlockState]
        self._left = context.tracer.source("left")
        self._written_states = allocator.pool.state.copy()  # [N] states as written to the trace
        self._num_held = [0] * len(allocator.tables.capacity)  # [S] blocks of each slot
        self._num_moves = allocator.pool.num_moves
        self._new: list[tuple[int, Indices, Ints]] = []  # (step, slots, blocks) of new table entries not yet written

    def served(self, plan: StepPlan, grant: StepGrant | None, report: PlanReport) -> None:
        """Writes the changes of a plan."""
        step = plan.step
        if report.is_reset:
            self._leave(step, range(len(self._num_held)))
        else:
            self._leave(step, (*plan.ended, *plan.dropped, *plan.preempted, *report.preempted))
        if grant is not None and len(grant.table_blocks):
            self._new.append((step, grant.table_slots, grant.table_blocks))
        has_moved = self._allocator.pool.num_moves != self._num_moves
        if len(self._new) >= PLANS_AT_ONCE or has_moved:
            self.flush()
        if has_moved:
            self._note_moves(step)

    def flush(self) -> None:
        """Writes the new table entries that are not yet written."""
        if not self._new:
            return
        new, self._new = self._new, []
        slots, blocks = np.concatenate([each[1] for each in new]), np.concatenate([each[2] for each in new])
        steps = np.repeat([each[0] for each in new], [len(each[2]) for each in new])
        self._written_states[blocks] = BlockState.IN_USE
        in_use = self._state_names[BlockState.IN_USE]
        steps, owners, firsts, counts = _ranges(steps, slots, blocks)
        for slot, count in zip(owners.tolist(), counts.tolist(), strict=True):
            self._num_held[slot] += count
        self._tracer.emit_many(EventKind.KV_RANGE, self._source, steps, owners, firsts, counts, in_use)

    def _leave(self, step: int, slots: Iterable[int]) -> None:
        for slot in slots:
            self.flush()
            num_held, self._num_held[slot] = self._num_held[slot], 0
            if num_held:
                self._tracer.emit(EventKind.KV_RANGE, self._source, step, slot, 0, num_held, self._left)

    def _note_moves(self, step: int) -> None:
        """Writes the state changes of blocks that are in no table."""
        pool, source = self._allocator.pool, self._source
        self._num_moves = pool.num_moves
        changed = (pool.state != self._written_states).nonzero()[0]
        states = self._written_states[changed] = pool.state[changed]
        is_unused = states != BlockState.IN_USE  # `flush` writes those in use
        changed, states = changed[is_unused], states[is_unused].astype(np.intp)
        _, of_ranges, firsts, counts = _ranges(np.full(len(changed), step), states, changed)
        if len(firsts):
            names = np.array(self._state_names)[of_ranges]
            no_slots = np.full(len(firsts), NO_SLOT)
            self._tracer.emit_many(EventKind.KV_RANGE, source, step, no_slots, firsts, counts, names)
        counters = (pool.num_free, pool.num_in_use, pool.num_cached, pool.num_quarantined)
        self._tracer.emit(EventKind.KV_POOL, source, step, *counters)


def _ranges(steps: Indices, keys: Indices, blocks: Ints | Indices) -> tuple[Indices, Indices, Indices, Indices]:
    """Joins adjacent entries with the same step, the same key and consecutive block ids.

    Returns (step, key, first block, count) of each range.
    """
    if not len(blocks):
        return NO_INDICES, NO_INDICES, NO_INDICES, NO_INDICES
    is_new = (np.diff(keys) != 0) | (np.diff(blocks) != 1) | (np.diff(steps) != 0)
    begins = np.concatenate([[True], is_new]).nonzero()[0]
    counts = np.diff(np.concatenate([begins, [len(blocks)]]))
    return steps[begins], keys[begins], blocks[begins].astype(np.intp), counts
