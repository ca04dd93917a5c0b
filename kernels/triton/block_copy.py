"""The Triton kernel that copies whole blocks of the KV cache.

Its twin is `copy_blocks` in `kernels/reference/attention.py`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import math

import torch
from torch import Tensor

import triton
import triton.language as tl

from .launch import num_multiprocessors

TILE_WORDS = 2048  # 8 KiB: 4 accesses of 16 bytes a thread
PROGRAMS_PER_MULTIPROCESSOR = 8


def copy_blocks(data: Tensor, axis: int, sources: Tensor, destinations: Tensor) -> None:
    """See `KernelSet.copy_blocks`: data [..., N, ...], ids [C] i64.

    A fixed number of programs for each multiprocessor copy tiles of 8 KiB, so one launch copies any number of blocks.
    """
    assert data.is_contiguous() and len(sources) == len(destinations)
    num_outer, num_inner = math.prod(data.shape[:axis]), math.prod(data.shape[axis + 1 :])
    inner_bytes = num_inner * data.element_size()
    word = torch.int32 if inner_bytes % 4 == 0 else torch.uint8
    words = data.view(-1).view(word)
    block_words = inner_bytes // word.itemsize
    tiles_per_piece = triton.cdiv(block_words, TILE_WORDS)
    num_tiles = len(sources) * num_outer * tiles_per_piece
    grid = min(num_tiles, PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(data.device))
    if not grid:
        return
    _copy_blocks_kernel[(grid,)](
        words, sources, destinations, num_tiles, tiles_per_piece, num_outer, data.shape[axis] * block_words,
        block_words, TILE=TILE_WORDS, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=["sources", "destinations"])
def _copy_blocks_kernel(
    words, sources, destinations, num_tiles, tiles_per_piece, num_outer, outer_words, block_words, TILE: tl.constexpr
):  # fmt: skip
    tile = tl.program_id(0)
    while tile < num_tiles:
        piece = tile // tiles_per_piece  # a block's numbers under one index of the preceding axes
        place = tile % tiles_per_piece * TILE + tl.arange(0, TILE)
        pair = piece // num_outer
        outer = words + (piece % num_outer).to(tl.int64) * outer_words
        source = tl.load(sources + pair).to(tl.int64)
        destination = tl.load(destinations + pair).to(tl.int64)
        is_word = place < block_words
        numbers = tl.load(outer + source * block_words + place, mask=is_word)
        tl.store(outer + destination * block_words + place, numbers, mask=is_word)
        tile += tl.num_programs(0)
