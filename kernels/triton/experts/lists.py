"""Triton kernels that list the pairs of a step by expert, and cut them into tiles of one expert each.

`launches.py` launches them; `kernels/layout/experts.py` says what a pair and a tile are. The order is by expert, and of
one expert by pair. Everything is found by comparing and counting, so nothing depends on which program comes first.

Few pairs are listed by one program, which compares all with all. Of more, each program counts a block of pairs by
expert; then each program of a second launch adds up the counts of all blocks, and those before its own.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from ...layout import experts
from ..launch import start_early

TILE = tl.constexpr(experts.TILE)


@triton.jit
def list_few(ids, order, tiles, num_tiles, num_pairs, PAIRS: tl.constexpr, TILE_ROWS: tl.constexpr):
    """All pairs, of which there are at most PAIRS, by one program."""
    pair, other = tl.arange(0, PAIRS)[:, None], tl.arange(0, PAIRS)[None, :]
    expert = tl.load(ids + pair, mask=pair < num_pairs, other=1 << 30)
    their = tl.load(ids + other, mask=other < num_pairs, other=1 << 30)
    is_same, is_below = expert == their, their < expert
    rank = tl.sum((is_same & (other < pair)).to(tl.int32), axis=1)  # within the expert
    their_rank = tl.sum((is_same & (pair < other)).to(tl.int32), axis=0)
    is_start = (their_rank % TILE_ROWS == 0)[None, :] & (other < num_pairs)  # of a tile
    place = tl.sum(is_below.to(tl.int32), axis=1) + rank
    tile = tl.sum((is_below & is_start).to(tl.int32), axis=1) + rank // TILE_ROWS
    left = tl.sum(is_same.to(tl.int32), axis=1) - rank
    mine = tl.arange(0, PAIRS)
    is_pair = mine < num_pairs
    tl.store(order + place, mine, mask=is_pair)
    _store_tiles(tiles, tile, tl.sum(tl.where(pair == other, expert, 0), axis=1), place, rank, left, is_pair, TILE_ROWS)
    tl.store(num_tiles, tl.sum(tl.sum(is_start.to(tl.int32), axis=1), axis=0))


@triton.jit
def _store_tiles(tiles, tile, expert, place, rank, left, is_pair, TILE_ROWS: tl.constexpr):
    """The tiles that begin with these pairs: those whose rank within the expert is a multiple of TILE_ROWS."""
    begins = is_pair & (rank % TILE_ROWS == 0)
    entry = tiles + tile * TILE
    tl.store(entry, expert, mask=begins)
    tl.store(entry + 1, place, mask=begins)
    tl.store(entry + 2, tl.minimum(left, TILE_ROWS), mask=begins)


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(
    counts, ids, num_pairs, EXPERTS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """The pairs of a block by expert: counts [blocks, EXPERTS]."""
    start_early(IS_EARLY)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < num_pairs, other=LANES - 1)  # EXPERTS < LANES
    lane = tl.arange(0, LANES)
    tl.store(counts + tl.program_id(0) * EXPERTS + lane, tl.histogram(expert, LANES), mask=lane < EXPERTS)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def place_kernel(
    order, tiles, num_tiles, ids, counts, num_pairs, num_blocks,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, TURN: tl.constexpr,
    TILE_ROWS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Places the pairs of a block, and writes the tiles that begin in it."""
    start_early(IS_EARLY)
    block = tl.program_id(0)
    lane = tl.arange(0, LANES)
    totals = tl.zeros([LANES], tl.int32)
    before = tl.zeros([LANES], tl.int32)  # in earlier blocks
    for first in range(0, num_blocks, TURN):
        which = first + tl.arange(0, TURN)[:, None]
        is_there = (which < num_blocks) & (lane < EXPERTS)[None, :]
        some = tl.load(counts + which * EXPERTS + lane[None, :], mask=is_there, other=0)
        totals += tl.sum(some, axis=0)
        before += tl.sum(tl.where(which < block, some, 0), axis=0)
    begins = tl.cumsum(totals, 0) - totals
    num = (totals + TILE_ROWS - 1) // TILE_ROWS
    first_tiles = tl.cumsum(num, 0) - num
    if block == 0:
        tl.store(num_tiles, tl.sum(num, 0))
    pair = block * BLOCK + tl.arange(0, BLOCK)
    is_pair = pair < num_pairs
    expert = tl.load(ids + pair, mask=is_pair, other=LANES - 1)
    rank = tl.gather(before, expert, 0)  # within the expert
    for first in range(block * BLOCK, (block + 1) * BLOCK, AT_ONCE):
        other = first + tl.arange(0, AT_ONCE)
        their = tl.load(ids + other, mask=other < num_pairs, other=LANES - 1)
        is_before = (expert[:, None] == their[None, :]) & (other[None, :] < pair[:, None])
        rank += tl.sum(is_before.to(tl.int32), axis=1)
    place = tl.gather(begins, expert, 0) + rank
    tl.store(order + place, pair, mask=is_pair)
    tile = tl.gather(first_tiles, expert, 0) + rank // TILE_ROWS
    _store_tiles(tiles, tile, expert, place, rank, tl.gather(totals, expert, 0) - rank, is_pair, TILE_ROWS)
