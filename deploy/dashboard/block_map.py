"""The map of the KV cache for the dashboard: one number per block, in full and then as changes.

0 free, 1 cached, 2 quarantined, 3 used by several sequences, 4 + slot: used by the sequence in that slot

With several kinds of memory the numbers are those of equal cells of its slabs, and the map says which kind has a slab.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...stages.allocate.tiers.block_pool import BlockState
from ...stages.engine.engine_status import BlockStatus

FREE, CACHED, QUARANTINED, SHARED, FIRST_SLOT = range(5)

Cells = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class BlockOwners:
    """The blocks of a running engine or of a recording."""

    blocks: BlockStatus
    owners: Mapping[int, str]  # slot -> id of the request in it
    block_size: int


def block_cells(blocks: BlockStatus) -> Cells:
    """[N] u16: the number of each block."""
    cells = _BY_STATE[blocks.state]
    slots = np.flatnonzero(blocks.num_held)
    cells[blocks.table_blocks] = np.repeat(FIRST_SLOT + slots, blocks.num_held[slots])
    cells[blocks.num_tables > 1] = SHARED
    return cells


_BY_STATE = np.zeros(len(BlockState), np.uint16)
_BY_STATE[[BlockState.IN_USE, BlockState.CACHED, BlockState.QUARANTINED]] = FIRST_SLOT, CACHED, QUARANTINED


class BlockMap:
    """The last map sent to one viewer. `next` returns the changes since, or the whole map if that is shorter."""

    def __init__(self) -> None:
        self._cells: Cells | None = None
        self._owners: dict[int, str] | None = None
        self._slab_kinds: str | None = None

    def next(
        self, block_owners: BlockOwners, may_see: Callable[[str], bool] = lambda request_id: True
    ) -> dict[str, Any]:
        """The update for the viewer.

        `cells` (u16) has all blocks; or `at` (u32) has the ids of changed blocks and `to` (u16) their numbers. All are
        little-endian in base64. `owners` is slot -> request id of requests that the viewer `may_see`, if changed.
        `slabs`, with several kinds of memory and if changed, has the kind of each (u8, 255: none).
        """
        cells = block_cells(block_owners.blocks)
        owners = {slot: request_id for slot, request_id in block_owners.owners.items() if may_see(request_id)}
        changes: dict[str, Any] = {}
        changed = None if self._cells is None else np.flatnonzero(cells != self._cells)
        if changed is None or 3 * len(changed) > len(cells):
            changes = {
                "num_blocks": len(cells),
                "block_size": block_owners.block_size,
                "cells": _text(cells, "<u2"),
            }
        elif len(changed):
            changes = {"at": _text(changed, "<u4"), "to": _text(cells[changed], "<u2")}
        if owners != self._owners:
            changes["owners"] = {str(slot): request_id for slot, request_id in owners.items()}
        self._cells, self._owners = cells, owners
        if (slabs := block_owners.blocks.slabs) is not None and (of := _text(slabs.kind_of, "<u1")) != self._slab_kinds:
            changes["slabs"] = {"kinds": list(slabs.kinds), "cells_per_slab": slabs.cells_per_slab, "of": of}
            self._slab_kinds = of
        return changes


def _text(values: NDArray[np.integer[Any]], form: str) -> str:
    return b64encode(values.astype(form).tobytes()).decode()
