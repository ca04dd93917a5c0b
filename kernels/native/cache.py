"""The paged cache of the native library: its memory, block positions, and block copies."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from .page_preallocation import LARGE_PAGE, NO_LIMIT, PagePreallocation
from .shape import CACHE_TYPES, Array, CacheDType, Longs, NativeShape

RUN_TOKENS = 256  # as RUN_TOKENS in source/attention/kv_layout.h
CACHE_LINE = 64  # bytes
NEARLY_FULL = 3 / 4  # share of the cache in use from which blocks may soon be offloaded to the host


class NativeCache:
    """The paged cache: `data` [layers, runs, pieces, blocks of a run, numbers], uint16 for bfloat16.

    Zero at the start. The system hands out its pages at first use, or before that, between steps
    (`page_preallocation.py`). The library defines the contents of a block's pieces; `at` gives the index of a block.
    """

    def __init__(
        self,
        shape: NativeShape,
        num_blocks: int,
        block_size: int,
        dtype: CacheDType,
        blocks_ahead: int = 0,
        available_bytes: Callable[[], int] = lambda: NO_LIMIT,
    ) -> None:
        """`blocks_ahead`: blocks past the used ones whose memory is preallocated once `ahead` is started.

        Stops while the system has too little memory left; `available_bytes()` returns the bytes that are left. Once the
        cache is nearly full, does the same for the host blocks: as many, but at most half of them.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        item = np.dtype(CACHE_TYPES[dtype])
        block_bytes = shape.bytes_per_block(block_size, dtype) // shape.num_layers
        num_pieces = 2 * shape.num_kv_heads
        self._run = run = blocks_of_a_run(block_size)
        num_runs = -(-num_blocks // run)
        self.layer_stride_blocks = spread_layers(num_runs * run, block_bytes, shape.num_layers)
        memory = aligned_zeros((shape.num_layers, self.layer_stride_blocks, block_bytes // item.itemsize), item)
        used = memory[:, : num_runs * run]  # the rest is address space
        self.data = used.reshape(shape.num_layers, num_runs, num_pieces, run, -1)
        assert np.may_share_memory(self.data, memory), "a copy of the cache is not the cache"
        self._run_bytes = run * block_bytes
        self._blocks_ahead = blocks_ahead
        self._available_bytes = available_bytes
        self.ahead = self._take_ahead(used, blocks_ahead * block_bytes)
        self.ahead_on_host: PagePreallocation | None = None  # once there are host blocks
        self._is_nearly_full = False

    def _take_ahead(self, regions: Array, ahead_bytes: int) -> PagePreallocation:
        ahead = PagePreallocation(regions, ahead_bytes, available_bytes=self._available_bytes)
        weakref.finalize(self, ahead.stop)
        return ahead

    def note_used(self, block: int) -> None:
        """Notes that a block is used, or about to be. All smaller block ids count as used."""
        self.ahead.note_used((block // self._run + 1) * self._run_bytes)
        if not self._is_nearly_full and block >= NEARLY_FULL * self.num_blocks:
            self._is_nearly_full = True
            if self.ahead_on_host is not None:
                self.ahead_on_host.start()

    def begin_step(self) -> None:
        """A step begins: preallocation pauses."""
        self.ahead.begin_step()
        if self.ahead_on_host is not None:
            self.ahead_on_host.begin_step()

    def end_step(self) -> None:
        """The step is over: preallocation may resume."""
        self.ahead.end_step()
        if self.ahead_on_host is not None:
            self.ahead_on_host.end_step()

    def at(self, blocks: Longs | int) -> tuple[Any, ...]:
        """The index in `data` of one block, [layers, pieces, numbers], or of B, [B, layers, pieces, numbers]."""
        return (slice(None), blocks // self._run, slice(None), blocks % self._run)

    def copy_blocks(self, sources: Longs, destinations: Longs) -> None:
        """Copies block `sources[i]` to `destinations[i]`, [C] each, in all layers. No block may be both."""
        for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
            self.data[self.at(destination)] = self.data[self.at(source)]

    def make_host_blocks(self, num_blocks: int) -> Array:
        """Allocates host blocks, [blocks, layers, pieces, numbers]; call once.

        Until the cache is nearly full they take address space only. The layers of a block are contiguous, so that a
        used block takes no more memory than it needs: with a page per layer, four blocks would take 60 MiB.
        """
        assert self.ahead_on_host is None, "host blocks are already allocated"
        num_layers, _, num_pieces, _, numbers = self.data.shape
        host: Array = np.empty((num_blocks, num_layers, num_pieces, numbers), self.data.dtype)
        ahead_bytes = min(self._blocks_ahead, num_blocks // 2) * host[:1].nbytes
        self.ahead_on_host = self._take_ahead(host.reshape(1, -1), ahead_bytes)
        return host

    def copy_out(self, blocks: Longs, host: Array, places: Longs) -> None:
        """Copies block `blocks[i]` to block `places[i]` of `host`, [C] each."""
        if self._is_nearly_full and self.ahead_on_host is not None and len(places):
            self.ahead_on_host.note_used((int(places.max()) + 1) * host[:1].nbytes)
        for block, place in zip(blocks.tolist(), places.tolist(), strict=True):
            host[place] = self.data[self.at(block)]

    def copy_in(self, host: Array, places: Longs, blocks: Longs) -> None:
        """Copies block `places[i]` of `host` to block `blocks[i]`, [C] each."""
        for place, block in zip(places.tolist(), blocks.tolist(), strict=True):
            self.data[self.at(block)] = host[place]


def aligned_zeros(shape: tuple[int, ...], item: np.dtype[Any]) -> Array:
    """A zeroed array, aligned to a large page of the system or, if it is smaller, to a cache line.

    An array of numpy's own begins 16 bytes into a page, so that many vectors straddle two cache lines: attention of
    prompts took 1 to 4 % longer (256 and 512 tokens, AVX2 on a Zen 3 class EPYC).
    """
    num_bytes = math.prod(shape) * item.itemsize
    alignment = LARGE_PAGE if num_bytes >= LARGE_PAGE else CACHE_LINE
    memory = np.zeros(num_bytes + alignment, np.uint8)
    begin = -memory.ctypes.data % alignment
    return memory[begin : begin + num_bytes].view(item).reshape(shape)


def blocks_of_a_run(block_size: int) -> int:
    """Blocks of a run: those that hold `RUN_TOKENS`, rounded down to a power of two, but at least one."""
    return 1 << max(0, (RUN_TOKENS // block_size).bit_length() - 1)


def spread_layers(num_blocks: int, block_bytes: int, num_layers: int) -> int:
    """Blocks from the start of one layer to the next, at least `num_blocks`.

    The result spreads the starts of the layers evenly over the offsets in a large page. The system takes 0.2 ms to
    hand out such a page, and 5 ms in a virtual machine whose host does the same. Blocks are first used in order, in all
    layers alike, so with equal offsets all layers would need their next page in one step (30 layers: 150 ms).
    """
    if num_blocks * block_bytes < LARGE_PAGE:
        return num_blocks

    def distance(count: int) -> int:
        place = (count * block_bytes - LARGE_PAGE // num_layers) % LARGE_PAGE
        return min(place, LARGE_PAGE - place)

    return min(range(num_blocks, num_blocks + LARGE_PAGE // block_bytes + 1), key=distance)
