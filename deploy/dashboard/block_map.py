"""The map of the KV cache for the dashboard: one number per block, in full and then as changes.

0 free, 1 cached, 2 quarantined, 3 used by several sequences, 4 + slot: used by the sequence in that slot
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...stages.allocate.block_pool import BlockPool, BlockState, BlockTables
from ...stages.schedule.scheduler import Scheduler

FREE, CACHED, QUARANTINED, SHARED, FIRST_SLOT = range(5)

Cells = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class BlockOwners:
    """Pool, block tables and scheduler of a running engine or of a recording."""

    pool: BlockPool
    block_tables: BlockTables
    scheduler: Scheduler

    def owners(self) -> dict[int, str]:
        """slot -> id of the request in it."""
        slots = self.scheduler.slots
        found = ((slot, slots.sequences[slot]) for slot in slots.running().tolist())
        return {slot: sequence.request_id for slot, sequence in found if sequence is not None}


def block_cells(block_owners: BlockOwners) -> Cells:
    """[N] u16: the number of each block."""
    pool, tables = block_owners.pool, block_owners.block_tables
    cells = _BY_STATE[pool.state]
    counts = tables.num_blocks
    slots = np.flatnonzero(counts)
    held = np.arange(counts.max(initial=0)) < counts[slots, None]  # [S, M] of the tables' entries
    cells[tables.blocks[slots, : held.shape[1]][held]] = np.repeat(FIRST_SLOT + slots, counts[slots])
    cells[pool.num_tables > 1] = SHARED
    return cells


_BY_STATE = np.zeros(len(BlockState), np.uint16)
_BY_STATE[[BlockState.IN_USE, BlockState.CACHED, BlockState.QUARANTINED]] = FIRST_SLOT, CACHED, QUARANTINED


class BlockMap:
    """The last map sent to one viewer. `next` returns the changes since, or the whole map if that is shorter."""

    def __init__(self) -> None:
        self._cells: Cells | None = None
        self._owners: dict[int, str] | None = None

    def next(
        self, block_owners: BlockOwners, may_see: Callable[[str], bool] = lambda request_id: True
    ) -> dict[str, Any]:
        """The update for the viewer.

        `cells` (u16) has all blocks; or `at` (u32) has the ids of changed blocks and `to` (u16) their numbers. All are
        little-endian in base64. `owners` is slot -> request id of requests that the viewer `may_see`, if changed.
        """
        cells = block_cells(block_owners)
        owners = {slot: request_id for slot, request_id in block_owners.owners().items() if may_see(request_id)}
        changes: dict[str, Any] = {}
        changed = None if self._cells is None else np.flatnonzero(cells != self._cells)
        if changed is None or 3 * len(changed) > len(cells):
            changes = {
                "num_blocks": len(cells),
                "block_size": block_owners.pool.block_size,
                "cells": _text(cells, "<u2"),
            }
        elif len(changed):
            changes = {"at": _text(changed, "<u4"), "to": _text(cells[changed], "<u2")}
        if owners != self._owners:
            changes["owners"] = {str(slot): request_id for slot, request_id in owners.items()}
        self._cells, self._owners = cells, owners
        return changes


def _text(values: NDArray[np.integer[Any]], form: str) -> str:
    return b64encode(values.astype(form).tobytes()).decode()
