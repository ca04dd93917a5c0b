"""The blocks of several kinds as one row of cells, for the map of blocks: slab by slab, whichever kind has it now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..allocate.tiers.block_pool import BlockState
from ..messages import Indices
from .engine_status import BlockStatus, SlabStatus

if TYPE_CHECKING:
    from ..allocate.allocator import Allocator

NO_KIND = 255


def read_slab_cells(allocator: Allocator) -> BlockStatus:
    """The cells of all slabs. A slab has as many as blocks of the smallest kind; a larger block fills several."""
    assert allocator.layout is not None
    layout, kinds, num_slots = allocator.layout, allocator.kinds, len(allocator.tables.num_tokens)
    per_slab = max(layout.blocks_per_slab)
    state = np.full((layout.num_slabs, per_slab), BlockState.FREE, np.int8)
    num_tables = np.zeros((layout.num_slabs, per_slab), np.int32)
    slab_kinds = np.full(layout.num_slabs, NO_KIND, np.uint8)
    held: list[list[Indices]] = [[] for _ in range(num_slots)]
    for number, each in enumerate(kinds):
        size = layout.blocks_per_slab[number]
        block_of = np.arange(per_slab) * size // per_slab  # of each cell of a slab
        states = each.pool.state.reshape(layout.num_slabs, size)
        mine = (states != BlockState.ABSENT).all(axis=1)
        slab_kinds[mine] = number
        state[mine] = states[mine][:, block_of]
        num_tables[mine] = each.pool.num_tables.reshape(layout.num_slabs, size)[mine][:, block_of]
        begins = np.searchsorted(block_of, np.arange(size + 1))  # first cell of each block of a slab
        for slot in np.flatnonzero(each.tables.capacity).tolist():
            of_slot, places = np.divmod(each.tables.held_by(slot), size)
            cells = [
                slab * per_slab + np.arange(begins[i], begins[i + 1]) for slab, i in zip(of_slot, places, strict=True)
            ]
            held[slot].extend(cells)
    num_held = np.array([sum(map(len, cells)) for cells in held], np.int32)
    flat = [cells for every in held for cells in every]
    table_blocks = (np.concatenate(flat) if flat else np.zeros(0, np.intp)).astype(np.int32)
    slabs = SlabStatus(tuple(kind.name for kind in layout.kinds), per_slab, slab_kinds)
    return BlockStatus(state.reshape(-1), num_tables.reshape(-1), num_held, table_blocks, slabs)
