"""Writes who holds which KV blocks, as ranges and as changes only: whoever reads all of it knows each block's state.

Knows the allocator's books. A step in which rows go on in the blocks they have writes nothing.
"""

from __future__ import annotations

import numpy as np

from ..runtime.stage import Context
from ..runtime.trace import NO_SLOT, EventKind
from .allocator import Allocator
from .blocks import BlockState
from .messages import Indices, Ints, PlanReport, StepGrant, StepPlan

FEW_BLOCKS = 16  # up to so many, a loop is faster than array operations


class KVTrace:
    """What the trace knows of the blocks of `allocator`. Told of each plan once it is served, in order."""

    def __init__(self, context: Context, allocator: Allocator) -> None:
        self._tracer, self._source = context.tracer, context.source
        self._allocator = allocator
        self._state_names = [context.tracer.source(state.name.lower()) for state in BlockState]
        self._left = context.tracer.source("left")
        self._told = allocator.pool.state.copy()  # [N] states
        self._num_held = [0] * len(allocator.tables.room)  # [S] blocks of each slot
        self._num_moves = allocator.pool.num_moves

    def served(self, plan: StepPlan, grant: StepGrant | None, report: PlanReport) -> None:
        """Writes what a plan changed."""
        step = plan.step
        if report.is_reset:
            self._leave(step, range(len(self._num_held)))
        else:
            self._leave(step, (*plan.ended, *plan.dropped, *plan.preempted, *report.preempted))
        if grant is not None and len(grant.table_blocks):
            self._enter(step, grant.table_slots, grant.table_blocks)
        if self._allocator.pool.num_moves != self._num_moves:
            self._note_moves(step)

    def _leave(self, step: int, slots: range | tuple[int, ...]) -> None:
        for slot in slots:
            num_held, self._num_held[slot] = self._num_held[slot], 0
            if num_held:
                self._tracer.emit(EventKind.KV_RANGE, self._source, step, slot, 0, num_held, self._left)

    def _enter(self, step: int, slots: Indices, blocks: Ints) -> None:
        self._told[blocks] = BlockState.IN_USE
        in_use = self._state_names[BlockState.IN_USE]
        owners, firsts, counts = _ranges(slots, blocks)
        for slot, count in zip(owners.tolist(), counts.tolist(), strict=True):
            self._num_held[slot] += count
        self._tracer.emit_many(EventKind.KV_RANGE, self._source, step, owners, firsts, counts, in_use)

    def _note_moves(self, step: int) -> None:
        """Blocks that are in no table now have another state than the trace has said."""
        pool, source = self._allocator.pool, self._source
        self._num_moves = pool.num_moves
        changed = np.flatnonzero(pool.state != self._told)
        states = self._told[changed] = pool.state[changed]
        is_told = states != BlockState.IN_USE  # the others are in the grant's tables
        of_ranges, firsts, counts = _ranges(states[is_told].astype(np.intp), changed[is_told])
        if len(firsts):
            names = np.array(self._state_names)[of_ranges]
            no_slots = np.full(len(firsts), NO_SLOT)
            self._tracer.emit_many(EventKind.KV_RANGE, source, step, no_slots, firsts, counts, names)
        counters = (pool.num_free, pool.num_in_use, pool.num_cached, pool.num_quarantined)
        self._tracer.emit(EventKind.KV_POOL, source, step, *counters)


def _ranges(keys: Indices, blocks: Ints | Indices) -> tuple[Indices, Indices, Indices]:
    """Neighbours in the list with one key whose ids follow each other, joined: (key, first block, count) of each."""
    if len(blocks) <= FEW_BLOCKS:
        joined: list[list[int]] = []
        for key, block in zip(keys.tolist(), blocks.tolist(), strict=True):
            if joined and joined[-1][0] == key and sum(joined[-1][1:]) == block:
                joined[-1][2] += 1
            else:
                joined.append([key, block, 1])
        columns = np.array(joined, np.intp).reshape(-1, 3)
        return columns[:, 0], columns[:, 1], columns[:, 2]
    is_first = np.concatenate([[True], (np.diff(keys) != 0) | (np.diff(blocks) != 1)])
    begins = np.flatnonzero(is_first)
    counts = np.diff(np.concatenate([begins, [len(blocks)]]))
    return keys[begins], blocks[begins].astype(np.intp), counts
