"""Where the layers of the native cache lie: spread over the large pages of the system, and no bit changes by it."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.kernels.native import build, machine
from millrace.kernels.native import cache as native
from millrace.kernels.native.cache import LARGE_PAGE, spread_layers
from millrace.stages.allocate.block_pool import BlockPool
from tests.kernels.native_oracle import Checkpoint, Run

NEEDS_LIBRARY = pytest.mark.skipif(
    not machine.instruction_sets() or build.find_compiler() is None, reason="no AVX2, or no C++ compiler"
)


@pytest.mark.parametrize("num_blocks", [8192, 16384, 5825, 1000])
@pytest.mark.parametrize(
    ("num_layers", "block_bytes"), [(30, 12288), (28, 65536), (2, 4096), (64, 9 * 1024), (36, 16 * 26 * 2)]
)
def test_no_step_needs_a_new_page_for_more_than_a_few_layers(num_blocks: int, num_layers: int, block_bytes: int):
    apart = spread_layers(num_blocks, block_bytes, num_layers)
    assert num_blocks <= apart <= num_blocks + LARGE_PAGE // block_bytes
    if num_blocks * block_bytes < LARGE_PAGE:
        assert apart == num_blocks
        return
    places = np.sort(np.arange(num_layers) * apart * block_bytes % LARGE_PAGE)
    step_bytes = LARGE_PAGE // num_layers  # as much of each layer is used in a step
    most = max(int(np.sum((places - place) % LARGE_PAGE < step_bytes)) for place in places)
    assert most <= 4


def test_layers_of_blocks_as_large_as_a_page_are_left_where_they_are():
    assert spread_layers(100, LARGE_PAGE, 30) == 100


@NEEDS_LIBRARY
@pytest.mark.parametrize("block_size", [16, 4])
def test_answers_and_copies_are_the_same_bits_wherever_layers_lie(block_size: int, monkeypatch: pytest.MonkeyPatch):
    def answers() -> tuple[Run, list[np.ndarray]]:  # type: ignore[type-arg]
        run = Run(checkpoint.load("bfloat16", num_threads=2, worth_a_thread=1), block_size=block_size, num_blocks=160)
        first = run.whole(list(range(1, 40)), chunks=[7, 20])
        table = np.array(run._tables[0], np.int64)
        host = run.cache.make_host_blocks(len(table))
        run.cache.copy_out(table, host, np.arange(len(table)))
        run.cache.data[run.cache.at(table)] = 0
        moved = np.array([run._free.pop() for _ in table], np.int64)
        run.cache.copy_in(host, np.arange(len(table)), moved)
        run._tables[0] = moved.tolist()
        run.step({0: [3, 5], 1: [1, 2, 3]})
        return run, [first, np.array(run.logits[0]), np.array(run.logits[1])]

    checkpoint = Checkpoint.random()
    run_size = native.blocks_of_a_run(block_size)
    num_blocks = -(-160 // run_size) * run_size
    usual, expected = answers()
    assert usual.cache.layer_stride_blocks == num_blocks > run_size
    monkeypatch.setattr(native, "LARGE_PAGE", 1 << 14)
    spread, found = answers()
    assert spread.cache.layer_stride_blocks > num_blocks and spread.cache.data.shape == usual.cache.data.shape
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize(("num_blocks", "alignment"), [(1, 64), (9, 64), (4096, LARGE_PAGE)])
def test_a_cache_begins_with_a_line_and_a_large_one_with_a_page(num_blocks: int, alignment: int):
    for _ in range(3):  # memory that was just given back may lie well by chance
        cache = native.NativeCache(Checkpoint.random().shape, num_blocks, 16, "bfloat16")
        assert cache.data.ctypes.data % alignment == 0


def test_a_block_on_the_host_lies_in_one_piece_and_takes_no_more_pages_than_it_fills():
    shape = Checkpoint.random().shape
    cache = native.NativeCache(shape, 64, 16, "bfloat16")
    host = cache.make_host_blocks(5)
    assert host.shape == (5, *cache.data[cache.at(0)].shape)
    assert host[0].nbytes == shape.bytes_per_block(16, "bfloat16") and host.flags.c_contiguous


@pytest.mark.parametrize(
    ("block_size", "num_blocks"), [(1, 256), (4, 64), (16, 16), (24, 8), (32, 8), (256, 1), (512, 1)]
)
def test_a_piece_of_a_block_lies_beside_that_of_the_next_one_for_256_tokens(block_size: int, num_blocks: int):
    cache = native.NativeCache(Checkpoint.random().shape, 3 * num_blocks - 1, block_size, "bfloat16")
    assert native.blocks_of_a_run(block_size) == num_blocks
    if block_size & (block_size - 1) == 0:  # those that engines have
        assert BlockPool(1, block_size).run_size == num_blocks
    _, num_runs, num_pieces, _, numbers = cache.data.shape
    assert num_runs == -(-cache.num_blocks // num_blocks) and num_pieces == 2 * Checkpoint.random().shape.num_kv_heads

    def place(block: int, piece: int) -> int:  # numbers from the layer's beginning
        return int(cache.data[cache.at(block)][0, piece].ctypes.data - cache.data.ctypes.data) // 2

    run = num_pieces * num_blocks * numbers
    for block in range(cache.num_blocks):
        expected = [
            block // num_blocks * run + piece * num_blocks * numbers + block % num_blocks * numbers
            for piece in range(num_pieces)
        ]
        assert [place(block, piece) for piece in range(num_pieces)] == expected
