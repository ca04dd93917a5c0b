"""Work lists of attention: one step's work, divided evenly among a fixed number of programs.

A *query tile* is some new tokens of one sequence. For each key/value head it makes one *task*: the query heads of that
head, over the cached tokens that the tile sees, counted in tiles of `block_n`. Tasks lie end to end on a line, and
program p works on stretch p of it. So every program has the same number of tiles for any mix of lengths, and the number
of programs does not depend on lengths. An *item* is one program's part of one task. A task of one item writes its
result; the items of other tasks leave partial sums, which the program that ends last joins, in the order of tiles.

A query tile that sees nothing (padding) is a task of one tile, since its zeros must be written.

This file has the sizes and the plain twin, `list_work`. `kernels/triton/attention_plan.py` makes the lists on the
device; `kernels/triton/attention.py` walks them.

S sequences, T new tokens, H query heads, G key/value heads, D head size, P programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .attention_tilings import AttentionShape as AttentionShape
from .attention_tilings import Tiling as Tiling
from .attention_tilings import decode_tiling as decode_tiling
from .attention_tilings import extend_tiling as extend_tiling
from .attention_tilings import next_power_of_2 as next_power_of_2

Ints = npt.NDArray[np.int32]

MIN_TILES = 4  # of a program's stretch: shorter pieces cost more to merge than they save, unless programs lack work
MAX_FIXED_PIECES = 16  # of a decode task in batch-invariant mode; bounds the memory of partial sums


class WorkItem(IntEnum):
    """Columns of a work list."""

    SEQUENCE = 0  # row of the block tables
    ROW = 1  # of q, of the query tile's first token
    GROUP = 2  # key/value head
    FIRST_TILE = 3  # tiles [FIRST_TILE, END_TILE) of the cached tokens
    END_TILE = 4
    PARTIAL = 5  # index of its partial sums; -1 = the item is the whole task and writes its result
    POSITION = 6  # of the tile's first token in its sequence
    NUM_TOKENS = 7
    FIRST_PARTIAL = 8  # of a task with more than one item, the index of the first of them; the others follow
    NUM_PIECES = 9  # items of that task


class SplitTask(IntEnum):
    """Columns of the list of tasks with more than one item, which only the host makes."""

    ROW = 0
    NUM_TOKENS = 1
    GROUP = 2
    FIRST_PARTIAL = 3  # index of the task's first partial sums; the others follow, in the order of tiles
    NUM_PIECES = 4


@dataclass(frozen=True, slots=True)
class Division:
    """The sizes of one work list, for a number of sequences and tokens and any lengths."""

    kind: Literal["decode", "extend"]  # sequences with exactly one new token, or all others
    num_sequences: int
    num_tokens: int  # rows of q
    num_groups: int
    tokens_per_tile: int  # of a query tile; 1 for decode
    block_n: int
    num_programs: int
    is_fixed: bool  # batch-invariant
    min_tiles: int = MIN_TILES  # of a program's stretch, at least

    @property
    def max_tasks(self) -> int:
        """Tiles of sequence s begin at tile query_starts[s] // tokens_per_tile + s, which leaves room for any lengths.

        Rows past the last sequence count as one more sequence, which sees nothing.
        """
        tiles = self.num_sequences
        if self.kind == "extend":
            tiles += self.num_tokens // self.tokens_per_tile + 1
        return tiles * self.num_groups

    @property
    def max_pieces(self) -> int:
        """Pieces of a task in batch-invariant mode. Extend tasks are many and stay whole."""
        return MAX_FIXED_PIECES if self.kind == "decode" else 1

    @property
    def max_items(self) -> int:
        return self.max_tasks * self.max_pieces if self.is_fixed else self.max_tasks + self.num_programs - 1

    @property
    def max_splits(self) -> int:
        """Tasks with more than one item, at most."""
        if self.is_fixed:
            return self.max_tasks if self.max_pieces > 1 else 0
        return min(self.max_tasks, self.num_programs - 1)

    @property
    def max_partials(self) -> int:
        """For any `min_tiles`: each of the ends of P stretches cuts at most one task."""
        if self.is_fixed:
            return self.max_tasks * self.max_pieces if self.max_pieces > 1 else 0
        return self.max_splits + self.num_programs - 1


@dataclass(frozen=True, slots=True, eq=False)
class WorkList:
    """One step's items on the device, for all layers of one window. Rows past the counts are undefined."""

    division: Division
    tiling: Tiling
    items: Tensor  # [max_items, len(Item)] i32
    starts: Tensor  # [P + 1] i32; program p does the items [starts[p], starts[p + 1])
    arrivals: (
        Tensor  # [max_partials] i32; by a task's FIRST_PARTIAL, how many of its items ended since the list was made
    )
    counts: Tensor  # [2] i32: items, splits


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """One step's work lists by window, and memory for the partial sums of one layer at a time."""

    decode: dict[int | None, WorkList]
    extend: dict[int | None, WorkList]  # empty if every sequence has exactly one new token
    partials: Tensor  # f32


def divide(
    kind: Literal["decode", "extend"],
    shape: AttentionShape,
    tiling: Tiling,
    num_sequences: int,
    num_tokens: int,
    num_processors: int,
) -> Division:
    """The sizes of a step's list on a device with `num_processors` multiprocessors.

    Decode of few rows would leave most programs without work, so stretches may be as short as a tile; but not in
    batch-invariant mode, where they must not depend on the number of rows.
    """
    tokens = 1 if kind == "decode" else tiling.block_m // shape.group
    num_programs = num_processors * tiling.occupancy
    is_few = kind == "decode" and not shape.is_batch_invariant and 2 * num_sequences * shape.num_groups < num_programs
    return Division(
        kind,
        num_sequences,
        num_tokens,
        shape.num_groups,
        tokens,
        tiling.block_n,
        num_programs,
        shape.is_batch_invariant,
        1 if is_few else MIN_TILES,
    )


def weights_size(division: Division, rows: int) -> int:
    """Numbers in the maxima and sums of weights of all partial sums, `rows` of each piece.

    A multiple of 4, so that the sums behind them are aligned: else an odd number of rows would compile a kernel again.
    """
    return -(-2 * division.max_partials * rows // 4) * 4


def partials_size(division: Division, shape: AttentionShape) -> int:
    """Numbers in the partial sums of a list: for each row of a piece a maximum, a sum of weights, and D sums."""
    rows = division.tokens_per_tile * shape.group
    return weights_size(division, rows) + division.max_partials * rows * shape.head_dim


def table_sizes(division: Division) -> tuple[int, int, int, int, int]:
    """Numbers in the tables of items, their places on the line, starts, arrivals and counts.

    Multiples of 4, so that tables cut from one allocation are all aligned.
    """
    sizes = (
        division.max_items * len(WorkItem),
        division.max_items,
        division.num_programs + 1,
        division.max_partials,
        2,
    )
    items, begins, starts, arrivals, counts = (-(-size // 4) * 4 for size in sizes)
    return items, begins, starts, arrivals, counts


# ---- the plain twin -------------------------------------------------------------------------------------------------


class HostWorkList(NamedTuple):
    """A work list on the host, without unused rows."""

    items: Ints  # [items, len(Item)]
    starts: Ints  # [P + 1]
    splits: Ints  # [splits, len(SplitTask)]


class QueryTile(NamedTuple):
    """New tokens of one sequence, and the tiles [first, end) of cached tokens that any of them sees."""

    sequence: int
    row: int
    num_tokens: int
    position: int
    first: int
    end: int

    @property
    def cost(self) -> int:
        return max(1, self.end - self.first)


def list_work(division: Division, lengths: Tensor, query_starts: Tensor | None, window: int | None) -> HostWorkList:
    """The items of a step, and the program that does each.

    lengths       [S] i32       tokens in the cache, the new ones included; 0 = padding
    query_starts  [S + 1] i32   sequence s has rows [query_starts[s], query_starts[s + 1]) of q; None = row s alone
    window                      a token sees only the last `window` tokens, itself included; None sees all
    """
    tasks = [
        (tile, g)
        for tile in _query_tiles(division, lengths.tolist(), query_starts, window)
        for g in range(division.num_groups)
    ]
    stretch = max(division.min_tiles, -(-sum(tile.cost for tile, _ in tasks) // division.num_programs))
    items, begins, splits = [], [], []
    begin = num_partials = 0
    for tile, g in tasks:
        cuts = _cuts(division, begin, tile.cost, stretch)
        is_split = len(cuts) > 2
        whole = (num_partials, len(cuts) - 1) if is_split else (-1, 1)
        for piece, (low, high) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
            partial = num_partials + piece if is_split else -1
            tiles = (tile.first + low - begin, min(tile.end, tile.first + high - begin))
            items.append((tile.sequence, tile.row, g, *tiles, partial, tile.position, tile.num_tokens, *whole))
            begins.append(low)
        if is_split:
            splits.append((tile.row, tile.num_tokens, g, num_partials, len(cuts) - 1))
            num_partials += len(cuts) - 1
        begin += tile.cost
    starts = np.searchsorted(begins, np.arange(division.num_programs + 1) * stretch)
    return HostWorkList(
        np.array(items, np.int32).reshape(-1, len(WorkItem)),
        starts.astype(np.int32),
        np.array(splits, np.int32).reshape(-1, len(SplitTask)),
    )


def _cuts(division: Division, begin: int, cost: int, stretch: int) -> list[int]:
    """The positions where a task at [begin, begin + cost) of the line is cut, both ends included."""
    if division.is_fixed:
        share = max(division.min_tiles, -(-cost // division.max_pieces))
        return [*range(begin, begin + cost, share), begin + cost]
    first = (begin // stretch + 1) * stretch
    return [begin, *range(first, begin + cost, stretch), begin + cost]


def _query_tiles(
    division: Division, lengths: list[int], query_starts: Tensor | None, window: int | None
) -> Iterator[QueryTile]:
    starts = list(range(len(lengths) + 1)) if query_starts is None else query_starts.tolist()
    for sequence, length in enumerate([*lengths, 0]):
        is_tail = sequence == len(lengths)  # rows past the last sequence
        start, end = starts[sequence], division.num_tokens if is_tail else starts[sequence + 1]
        is_decode = end - start == 1 and not is_tail
        if is_decode != (division.kind == "decode"):
            continue
        for row in range(start, end, division.tokens_per_tile):
            num_tokens = min(division.tokens_per_tile, end - row)
            position = length - (end - row)
            seen = position + num_tokens if length else 0
            oldest = 0 if window is None else max(0, position + 1 - window)
            tiles = (oldest // division.block_n, -(-seen // division.block_n)) if length else (0, 0)
            yield QueryTile(min(sequence, len(lengths) - 1), row, num_tokens, position, *tiles)
