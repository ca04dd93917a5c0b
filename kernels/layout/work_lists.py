"""Work lists of attention: one step's work, divided evenly among a fixed number of programs.

A *query tile* is some new tokens of one sequence. For each key/value head it makes one *task*: the query heads of that
head, over the cached tokens that the tile sees, counted in tiles of `block_n`. An *item* is one program's part of one
task. A task of one item writes its result; the items of other tasks leave partial sums, which the program that ends
last joins, in the order of tiles. The number of programs does not depend on lengths. Tasks are divided in two ways:

- *The line*: tasks lie end to end, and program p works on stretch p. So every program has the same number of tiles for
  any mix of lengths, and up to P - 1 tasks are cut.
- *Whole*: tasks are dealt in order of cost, the longest first: one to each program from the first to the last, then one
  to each from the last to the first, and so on.

A step has a list of sequences with one new token (decode), and one of the others (extend), which is walked in a launch
of its own. With few sequences the extend list has all of them: they are few tasks, and a launch a layer is saved.

Decode tasks are about as many tiles long as each other: the line. Extend tasks are dealt whole, unless the programs of
the line end earlier by what its cuts cost. To begin an extend item takes as long as some tiles, so it counts as
ITEM_TILES of them in both ways. Without that, the program with the first tiles of a prompt would have many short items,
and end last.

A query tile that sees nothing (padding) is a task of one tile, since its zeros must be written.

This file has the sizes. `list_work.py` has the plain twin; `kernels/triton/attention_plan.py` makes the lists on the
device; `kernels/triton/attention_kernel.py` walks them.

S sequences, T new tokens, H query heads, G key/value heads, D head size, P programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

from torch import Tensor

from .attention_tilings import AttentionShape as AttentionShape
from .attention_tilings import Tiling as Tiling
from .attention_tilings import decode_tiling as decode_tiling
from .attention_tilings import extend_tiling as extend_tiling
from .attention_tilings import next_power_of_2 as next_power_of_2
from .attention_tilings import with_groups_of_latents as with_groups_of_latents

MIN_TILES = 4  # of a program's stretch: shorter pieces cost more to merge than they save, unless programs lack work
MAX_FIXED_PIECES = 16  # of a decode task in batch-invariant mode; bounds the memory of partial sums
# Six prompts on an H200 fit 6.2 us for each item of the last program to end, and 1.3 us for each tile.
ITEM_TILES = 5  # of extend: to begin an item takes as long
CUT_TILES = 8  # of extend: what cuts cost the last program, an item more, two partial sums and a merge


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


@dataclass(frozen=True, slots=True)
class Division:
    """The sizes of one work list, for a number of sequences and tokens and any lengths."""

    kind: Literal["decode", "extend"]  # sequences with exactly one new token, or all others; see `is_joint`
    num_sequences: int
    num_tokens: int  # rows of q
    num_groups: int
    tokens_per_tile: int  # of a query tile; 1 for decode
    block_n: int
    num_programs: int
    is_fixed: bool  # batch-invariant
    min_tiles: int = MIN_TILES  # of a program's stretch, at least
    is_joint: bool = False  # an extend list of all sequences

    @property
    def max_query_tiles(self) -> int:
        """Tiles of sequence s begin at tile query_starts[s] // tokens_per_tile + s, which leaves room for any lengths.

        Rows past the last sequence count as one more sequence, which sees nothing.
        """
        return self.num_sequences + (self.num_tokens // self.tokens_per_tile + 1 if self.kind == "extend" else 0)

    @property
    def max_tasks(self) -> int:
        return self.max_query_tiles * self.num_groups

    @property
    def item_tiles(self) -> int:
        """Tiles that the begin of an item counts as. Decode hides it, as programs share a multiprocessor."""
        return ITEM_TILES if self.kind == "extend" else 0

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

    decode: dict[int | None, WorkList]  # empty if the lists of extend are joint
    extend: dict[int | None, WorkList]  # empty if every sequence has exactly one new token
    partials: Tensor  # f32
    join: Callable[[], object] = lambda: None  # after it, launches run behind those that make the lists

    def ready(self) -> AttentionPlan:
        """The plan, for launches that read its lists."""
        self.join()
        return self


def divide(
    kind: Literal["decode", "extend"],
    shape: AttentionShape,
    tiling: Tiling,
    num_sequences: int,
    num_tokens: int,
    num_processors: int,
) -> Division:
    """The sizes of a step's list on a device with `num_processors` multiprocessors.

    Decode of few rows would leave most programs without work, so stretches may be as short as a tile, unless another
    number was measured; but not in batch-invariant mode, where they must not depend on the number of rows.
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
        tiling.min_tiles or (1 if is_few else MIN_TILES),
        kind == "extend" and is_joint(shape, tiling, num_sequences, num_processors),
    )


def is_joint(shape: AttentionShape, tiling: Tiling, num_sequences: int, num_processors: int) -> bool:
    """Whether the extend list, of that tiling, has all sequences of a step.

    So few that no program gets a task more for all that may have one new token. Not in batch-invariant mode: a tile of
    extend rounds as one of decode does not, and the step before may have been one of decode.
    """
    num_programs = num_processors * tiling.occupancy
    return not shape.is_batch_invariant and num_sequences * shape.num_groups <= num_programs


def weights_size(division: Division, rows: int) -> int:
    """Numbers in the maxima and sums of weights of all partial sums, `rows` of each piece.

    A multiple of 4, so that the sums behind them are aligned: else an odd number of rows would compile a kernel again.
    """
    return -(-2 * division.max_partials * rows // 4) * 4


def partials_size(division: Division, shape: AttentionShape) -> int:
    """Numbers in the partial sums of a list: for each row of a piece a maximum, a sum of weights, and D sums."""
    rows = division.tokens_per_tile * shape.group
    return weights_size(division, rows) + division.max_partials * rows * shape.head_dim


class TableSizes(NamedTuple):
    """Numbers in the tables of a list. Multiples of 4, so that tables cut from one allocation are all aligned."""

    items: int
    begins: int  # of items: their places on the line, or what they cost
    starts: int
    arrivals: int
    counts: int
    keys: int  # of query tiles: their order by cost


def table_sizes(division: Division) -> TableSizes:
    sizes = TableSizes(
        division.max_items * len(WorkItem),
        division.max_items,
        division.num_programs + 1,
        division.max_partials,
        2,
        division.max_query_tiles if division.kind == "extend" else 0,
    )
    return TableSizes(*(-(-size // 4) * 4 for size in sizes))
