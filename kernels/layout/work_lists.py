"""What attention has to do in one step, cut into pieces of even size and handed to a fixed number of programs.

A *query tile* is new tokens of one sequence, all heads of one key/value head at once. Over the cached tokens it sees,
counted in tiles of `block_n`, it makes one *task* for each key/value head. Tasks lie end to end on a line, and program
p works on stretch p of it: every program has as many tiles as any other, however lengths are mixed, and the number of
programs does not depend on them. An *item* is what one program does of one task. A task that is one item writes its
result; the items of others leave partial sums, which a merge joins.

A query tile that sees nothing (padding) is a task of one tile, since its zeros must be written.

Here are sizes and the plain twin; `kernels/triton/attention_plan.py` makes the lists on the device,
`kernels/triton/attention.py` walks them.

S sequences, T new tokens, H query heads, G key/value heads, D head size, P programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int32]

REGISTERS = 1 << 16  # of a multiprocessor
MOST_REGISTERS = 255  # of a thread
MIN_ROWS = 16  # the smallest M of a tensor-core dot; a group of fewer heads is padded: that costs FLOPs, not bytes
MIN_TILES = 4  # of a program's stretch: shorter pieces cost more to merge than they gain
MAX_FIXED_PIECES = 16  # of a decode task in batch-invariant mode, which bounds the partial sums of long contexts


class Item(IntEnum):
    """Columns of a work list."""

    SEQUENCE = 0  # row of the block tables
    ROW = 1  # of q, of the query tile's first token
    GROUP = 2  # key/value head
    FIRST_TILE = 3  # tiles [FIRST_TILE, END_TILE) of the cached tokens
    END_TILE = 4
    PARTIAL = 5  # where the partial sums go; -1 = the item is the whole task and writes its result
    POSITION = 6  # of the first token in its sequence
    NUM_TOKENS = 7


class Split(IntEnum):
    """Columns of the list of tasks with more than one item."""

    ROW = 0
    NUM_TOKENS = 1
    GROUP = 2
    FIRST_PARTIAL = 3  # the task's partial sums follow each other from here, in the order of tiles
    NUM_PIECES = 4


class Tiling(NamedTuple):
    """Launch shape of an attention kernel."""

    block_m: int  # query rows: tokens x heads of a group
    block_n: int  # cached tokens a step
    num_warps: int
    num_stages: int  # depth of the software pipeline of loads
    occupancy: int  # programs that fit on a multiprocessor together

    @property
    def max_registers(self) -> int | None:
        """Of a thread, so that the compiler leaves enough for `occupancy` programs: a multiprocessor gives REGISTERS
        out to a warp by 8 a thread. None: what a thread can have at most is not too many."""
        registers = REGISTERS // (32 * self.num_warps * self.occupancy) // 8 * 8
        return registers if registers < MOST_REGISTERS else None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a model's layers have in common, as far as attention goes."""

    num_heads: int
    num_groups: int  # key/value heads
    head_dim: int
    dtype: torch.dtype  # of queries
    cache_dtype: torch.dtype
    windows: tuple[int | None, ...] = (None,)  # each kind of layer once
    is_batch_invariant: bool = False  # cuts depend on a sequence's own length alone, so equal rows give equal bits

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_groups


@dataclass(frozen=True, slots=True)
class Division:
    """How one step's tasks are cut, for a fixed number of sequences and tokens and any lengths: the sizes of a list."""

    kind: Literal["decode", "extend"]  # of sequences with exactly one new token, or of all others
    num_sequences: int
    num_tokens: int  # rows of q
    num_groups: int
    tokens_per_tile: int  # of a query tile; 1 for decode
    block_n: int
    num_programs: int
    is_fixed: bool  # batch-invariant

    @property
    def max_tasks(self) -> int:
        """Tiles of sequence s begin at tile query_starts[s] // tokens_per_tile + s, which leaves room for any lengths;
        rows past the last sequence count as one more, which sees nothing."""
        tiles = self.num_sequences
        if self.kind == "extend":
            tiles += self.num_tokens // self.tokens_per_tile + 1
        return tiles * self.num_groups

    @property
    def max_pieces(self) -> int:
        """Of a task in batch-invariant mode. Extend tasks are many and stay whole."""
        return MAX_FIXED_PIECES if self.kind == "decode" else 1

    @property
    def max_items(self) -> int:
        return self.max_tasks * self.max_pieces if self.is_fixed else self.max_tasks + self.num_programs - 1

    @property
    def max_splits(self) -> int:
        """Tasks of more than one item."""
        if self.is_fixed:
            return self.max_tasks if self.max_pieces > 1 else 0
        return min(self.max_tasks, self.num_programs - 1)

    @property
    def max_partials(self) -> int:
        if self.is_fixed:
            return self.max_tasks * self.max_pieces if self.max_pieces > 1 else 0
        return self.max_splits + self.num_programs - 1


@dataclass(frozen=True, slots=True, eq=False)
class WorkList:
    """One step's items on the device, for all layers of one window. Rows past the counts hold anything."""

    division: Division
    tiling: Tiling
    items: Tensor  # [max_items, len(Item)] i32
    starts: Tensor  # [P + 1] i32; program p does the items [starts[p], starts[p + 1])
    splits: Tensor  # [max_splits, len(Split)] i32
    counts: Tensor  # [2] i32: items, splits


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """One step's work lists by window, and room for the partial sums of a layer at a time."""

    decode: dict[int | None, WorkList]
    extend: dict[int | None, WorkList]  # empty if every sequence has exactly one new token
    partials: Tensor  # f32


def decode_tiling(shape: AttentionShape, capability: int) -> Tiling:
    """Held, like `extend_tiling`, to its occupancy and to no spill in a loop on sm_80 and sm_90 by `compile_check`.

    `capability` is 80, 90, ...
    """
    rows = max(MIN_ROWS, next_power_of_2(shape.group))
    if shape.dtype == torch.float32:
        if shape.head_dim <= 64:
            return Tiling(rows, 32, 4, 2, 2)
        return Tiling(rows, 16, 8 if shape.head_dim <= 128 else 4, 2, 2)
    if shape.cache_dtype == torch.float8_e4m3fn:  # widening keys and values takes registers
        tiling = Tiling(rows, 32, 4, 3 if shape.head_dim <= 64 else 2, 3)
    else:
        tiling = Tiling(rows, 64, 4, 3 if shape.head_dim > 16 else 2, 3)
    if shape.head_dim > 64 and capability < 90:
        tiling = tiling._replace(occupancy=2)
    if shape.head_dim > 128:
        tiling = tiling._replace(block_n=32, occupancy=2)
    if rows > MIN_ROWS:
        tiling = tiling._replace(num_warps=4 if rows <= 32 else 8, occupancy=1)
    return tiling


def extend_tiling(shape: AttentionShape, capability: int) -> Tiling:
    """Rows of a tile hold whole tokens, `group` rows each, so `block_m >= group`."""
    if shape.dtype == torch.float32:
        tiling = Tiling(16, 32, 4, 2, 2) if shape.head_dim <= 64 else Tiling(16, 16, 8, 2, 2)
    elif shape.head_dim > 128:
        # With a cache in 8 bits, 64 rows spill: values go through registers on their way to warpgroup instructions.
        tiling = Tiling(32, 64, 8, 2, 1) if shape.cache_dtype == torch.float8_e4m3fn else Tiling(64, 32, 8, 2, 1)
    elif shape.head_dim > 64 and capability < 90:
        tiling = Tiling(64, 64, 8, 3, 1)
    else:
        tiling = Tiling(128, 64, 8, 3, 1)
    return tiling._replace(block_m=max(tiling.block_m, next_power_of_2(shape.group)))


def divide(
    kind: Literal["decode", "extend"],
    shape: AttentionShape,
    tiling: Tiling,
    num_sequences: int,
    num_tokens: int,
    num_processors: int,
) -> Division:
    """The sizes of a step's list on a device of so many multiprocessors."""
    tokens = 1 if kind == "decode" else tiling.block_m // shape.group
    return Division(
        kind,
        num_sequences,
        num_tokens,
        shape.num_groups,
        tokens,
        tiling.block_n,
        num_processors * tiling.occupancy,
        shape.is_batch_invariant,
    )


def partials_per_piece(division: Division, shape: AttentionShape) -> int:
    """Numbers of one piece: for each row D sums, a maximum and a sum of weights."""
    return division.tokens_per_tile * shape.group * (shape.head_dim + 2)


def table_sizes(division: Division) -> tuple[int, int, int, int, int]:
    """Numbers of items, of their places on the line, of starts, of splits and of counts, each to be a multiple of 4 so
    that tables cut from one piece of memory are all aligned."""
    sizes = (
        division.max_items * len(Item),
        division.max_items,
        division.num_programs + 1,
        division.max_splits * len(Split),
        2,
    )
    items, begins, starts, splits, counts = (-(-size // 4) * 4 for size in sizes)
    return items, begins, starts, splits, counts


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


# ---- the plain twin -------------------------------------------------------------------------------------------------


class Listed(NamedTuple):
    """A work list on the host, without the rows that hold nothing."""

    items: Ints  # [items, len(Item)]
    starts: Ints  # [P + 1]
    splits: Ints  # [splits, len(Split)]


class QueryTile(NamedTuple):
    """New tokens of one sequence, and the tiles [first, end) of cached tokens that some of them see."""

    sequence: int
    row: int
    num_tokens: int
    position: int
    first: int
    end: int

    @property
    def cost(self) -> int:
        return max(1, self.end - self.first)


def list_work(division: Division, lengths: Tensor, query_starts: Tensor | None, window: int | None) -> Listed:
    """The items of a step and who does them.

    lengths       [S] i32       tokens in the cache, the new ones included; 0 is padding
    query_starts  [S + 1] i32   sequence s has rows [query_starts[s], query_starts[s + 1]) of q; None = row s alone
    window                      a token sees only the last `window` tokens, itself included; None sees all
    """
    tasks = [
        (tile, g)
        for tile in _query_tiles(division, lengths.tolist(), query_starts, window)
        for g in range(division.num_groups)
    ]
    stretch = max(MIN_TILES, -(-sum(tile.cost for tile, _ in tasks) // division.num_programs))
    items, begins, splits = [], [], []
    begin = num_partials = 0
    for tile, g in tasks:
        cuts = _cuts(division, begin, tile.cost, stretch)
        is_split = len(cuts) > 2
        for piece, (low, high) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
            partial = num_partials + piece if is_split else -1
            tiles = (tile.first + low - begin, min(tile.end, tile.first + high - begin))
            items.append((tile.sequence, tile.row, g, *tiles, partial, tile.position, tile.num_tokens))
            begins.append(low)
        if is_split:
            splits.append((tile.row, tile.num_tokens, g, num_partials, len(cuts) - 1))
            num_partials += len(cuts) - 1
        begin += tile.cost
    starts = np.searchsorted(begins, np.arange(division.num_programs + 1) * stretch)
    return Listed(
        np.array(items, np.int32).reshape(-1, len(Item)),
        starts.astype(np.int32),
        np.array(splits, np.int32).reshape(-1, len(Split)),
    )


def _cuts(division: Division, begin: int, cost: int, stretch: int) -> list[int]:
    """Where a task at [begin, begin + cost) of the line is cut, its ends included."""
    if division.is_fixed:
        share = max(MIN_TILES, -(-cost // division.max_pieces))
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
