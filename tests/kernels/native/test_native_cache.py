"""Where blocks of the native cache lie: in slabs, a head's keys of 256 tokens side by side, and each kind's apart."""

from __future__ import annotations

import itertools

import pytest

from millrace.kernels.native.cache import NativeCache
from millrace.kernels.native.page_preallocation import LARGE_PAGE
from millrace.stages.allocate.tiers.block_pool import BlockPool
from tests.kernels.native_oracle import Checkpoint


@pytest.mark.parametrize(("num_blocks", "alignment"), [(1, 64), (9, 64), (4096, LARGE_PAGE)])
def test_a_cache_begins_with_a_line_and_a_large_one_with_a_page(num_blocks: int, alignment: int):
    for _ in range(3):  # memory that was just given back may lie well by chance
        cache = NativeCache.uniform(Checkpoint.random().shape, num_blocks, 16, "bfloat16")
        assert cache.data.ctypes.data % alignment == 0


def test_a_block_on_the_host_lies_in_one_piece_and_takes_no_more_pages_than_it_fills():
    shape = Checkpoint.random().shape
    cache = NativeCache.uniform(shape, 64, 16, "bfloat16")
    host = cache.make_host_blocks(5)
    assert host.shape == (5, *cache.data[cache.at(0)].shape)
    assert host[0].nbytes == shape.bytes_per_block(16, "bfloat16") and host.flags.c_contiguous


@pytest.mark.parametrize(
    ("block_size", "num_blocks"), [(1, 256), (4, 64), (16, 16), (24, 10), (32, 8), (256, 1), (512, 1)]
)
def test_a_piece_of_a_block_lies_beside_that_of_the_next_one_for_256_tokens(block_size: int, num_blocks: int):
    cache = NativeCache.uniform(Checkpoint.random().shape, 3 * num_blocks - 1, block_size, "bfloat16")
    assert cache.layout.blocks_per_slab == (num_blocks,)
    if block_size & (block_size - 1) == 0:  # those that engines have
        assert BlockPool(1, block_size).run_size == num_blocks
    num_slabs, num_layers, num_pieces, _, numbers = cache.data.shape
    assert num_slabs == -(-cache.num_blocks // num_blocks) and num_pieces == 2 * Checkpoint.random().shape.num_kv_heads

    def place(block: int, layer: int, piece: int) -> int:  # numbers from the beginning
        return int(cache.data[cache.at(block)][layer, piece].ctypes.data - cache.data.ctypes.data) // 2

    for block, layer in itertools.product(range(cache.num_blocks), range(num_layers)):
        slab, i = divmod(block, num_blocks)
        expected = [
            (((slab * num_layers + layer) * num_pieces + piece) * num_blocks + i) * numbers
            for piece in range(num_pieces)
        ]
        assert [place(block, layer, piece) for piece in range(num_pieces)] == expected
