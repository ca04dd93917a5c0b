"""The paged cache of the native library: where blocks lie, and how they are copied."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np

from .shape import CACHE_TYPES, Array, CacheDType, Longs, NativeShape
from .taken import LARGE_PAGE, NO_LIMIT, TakenAhead


class NativeCache:
    """The paged cache: `data` [layers, blocks, numbers of a block], uint16 for bfloat16; zero at the start, from pages
    that the system hands out when they are first used, or ahead of that, while nothing is computed. What is inside a
    block is the library's own."""

    def __init__(
        self,
        shape: NativeShape,
        num_blocks: int,
        block_size: int,
        dtype: CacheDType,
        blocks_ahead: int = 0,
        room: Callable[[], int] = lambda: NO_LIMIT,
    ) -> None:
        """Memory of `blocks_ahead` blocks past those that are used is taken ahead, once `ahead` was started, while as
        much is left of the `room()` bytes that the system has for us."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        item = np.dtype(CACHE_TYPES[dtype])
        block_bytes = shape.bytes_per_block(block_size, dtype) // shape.num_layers
        self.blocks_apart = spread_layers(num_blocks, block_bytes, shape.num_layers)
        memory: Array = np.zeros((shape.num_layers, self.blocks_apart, block_bytes // item.itemsize), item)
        self.data = memory[:, :num_blocks]  # the rest is address space
        self._block_bytes = block_bytes
        self.ahead = TakenAhead(self.data, blocks_ahead * block_bytes, room=room)
        weakref.finalize(self, self.ahead.stop)

    def note_used(self, block: int) -> None:
        """A block is used, or about to be, and so were those with smaller numbers."""
        self.ahead.note_used((block + 1) * self._block_bytes)

    def copy_blocks(self, sources: Longs, destinations: Longs) -> None:
        """Block `destinations[i]` becomes what block `sources[i]` is, [C] each, all layers; no block is both."""
        self._copy(self.data, sources, self.data, destinations)

    def make_host_blocks(self, num_blocks: int) -> Array:
        """Room for so many blocks, indexed as here, all layers of one side by side. What is never used takes address
        space and no memory, and what is used no more than it needs: a page for each layer would be 60 MiB for four."""
        num_layers, _, numbers = self.data.shape
        host: Array = np.empty((num_blocks, num_layers, numbers), self.data.dtype)
        return host.transpose(1, 0, 2)

    def copy_out(self, blocks: Longs, host: Array, places: Longs) -> None:
        """Block `places[i]` of `host` becomes block `blocks[i]`, [C] each."""
        self._copy(self.data, blocks, host, places)

    def copy_in(self, host: Array, places: Longs, blocks: Longs) -> None:
        """Block `blocks[i]` becomes block `places[i]` of `host`, [C] each."""
        self._copy(host, places, self.data, blocks)

    @staticmethod
    def _copy(source: Array, source_ids: Longs, destination: Array, destination_ids: Longs) -> None:
        for source_id, destination_id in zip(source_ids.tolist(), destination_ids.tolist(), strict=True):
            destination[:, destination_id] = source[:, source_id]


def spread_layers(num_blocks: int, block_bytes: int, num_layers: int) -> int:
    """Blocks from the beginning of one layer to that of the next, at least `num_blocks`: with so many, layers begin at
    places of the system's large pages that are as far apart as may be.

    The system takes 0.2 ms to hand out such a page, and 5 in a virtual machine whose host does the same. Blocks are
    first used in order, in all layers alike: from the same place in each, all layers would need their next page in one
    step (30 layers: 150 ms).
    """
    if num_blocks * block_bytes < LARGE_PAGE:
        return num_blocks

    def distance(count: int) -> int:
        place = (count * block_bytes - LARGE_PAGE // num_layers) % LARGE_PAGE
        return min(place, LARGE_PAGE - place)

    return min(range(num_blocks, num_blocks + LARGE_PAGE // block_bytes + 1), key=distance)
