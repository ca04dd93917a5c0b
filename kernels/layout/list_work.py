"""The plain twin of the kernel that makes work lists; `work_lists.py` describes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .work_lists import CUT_TILES, Division, WorkItem

Ints = npt.NDArray[np.int32]


class SplitTask(IntEnum):
    """Columns of the list of tasks with more than one item, which only the host makes."""

    ROW = 0
    NUM_TOKENS = 1
    GROUP = 2
    FIRST_PARTIAL = 3  # index of the task's first partial sums; the others follow, in the order of tiles
    NUM_PIECES = 4


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
    tiles = list(_query_tiles(division, lengths.tolist(), query_starts, window))
    costs = [tile.cost + division.item_tiles for tile in tiles for _ in range(division.num_groups)]
    stretch = max(division.min_tiles + division.item_tiles, -(-sum(costs) // division.num_programs))
    if division.kind == "extend":
        hands = _dealt(division, tiles)
        longest = max(sum(tile.cost + division.item_tiles for tile, _ in hand) for hand in hands)
        if division.is_fixed or longest <= stretch + CUT_TILES:
            return _whole(hands)
    return _on_the_line(division, tiles, stretch)


def _dealt(division: Division, tiles: list[QueryTile]) -> list[list[tuple[QueryTile, int]]]:
    """Each program's tasks, as query tiles and key/value heads."""
    in_order = sorted(tiles, key=lambda tile: -tile.cost)
    hands: list[list[tuple[QueryTile, int]]] = [[] for _ in range(division.num_programs)]
    for index, task in enumerate((tile, g) for tile in in_order for g in range(division.num_groups)):
        turn, place = divmod(index, division.num_programs)
        hands[-1 - place if turn % 2 else place].append(task)
    return hands


def _whole(hands: list[list[tuple[QueryTile, int]]]) -> HostWorkList:
    items = [
        (tile.sequence, tile.row, g, tile.first, tile.end, -1, tile.position, tile.num_tokens, -1, 1)
        for hand in hands
        for tile, g in hand
    ]
    starts = np.cumsum([0, *map(len, hands)])
    return _as_arrays(items, starts, [])


def _on_the_line(division: Division, tiles: list[QueryTile], stretch: int) -> HostWorkList:
    items, begins, splits = [], [], []
    begin = num_partials = 0
    for tile, g in ((tile, g) for tile in tiles for g in range(division.num_groups)):
        begin += division.item_tiles
        cuts = _cuts(division, begin, tile.cost, stretch)
        is_split = len(cuts) > 2
        whole = (num_partials, len(cuts) - 1) if is_split else (-1, 1)
        for piece, (low, high) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
            partial = num_partials + piece if is_split else -1
            reach = (tile.first + low - begin, min(tile.end, tile.first + high - begin))
            items.append((tile.sequence, tile.row, g, *reach, partial, tile.position, tile.num_tokens, *whole))
            begins.append(low)
        if is_split:
            splits.append((tile.row, tile.num_tokens, g, num_partials, len(cuts) - 1))
            num_partials += len(cuts) - 1
        begin += tile.cost
    return _as_arrays(items, np.searchsorted(begins, np.arange(division.num_programs + 1) * stretch), splits)


def _as_arrays(
    items: Sequence[tuple[int, ...]], starts: npt.NDArray[np.int64], splits: Sequence[tuple[int, ...]]
) -> HostWorkList:
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
        if not division.is_joint and is_decode != (division.kind == "decode"):
            continue
        for row in range(start, end, division.tokens_per_tile):
            num_tokens = min(division.tokens_per_tile, end - row)
            position = length - (end - row)
            seen = position + num_tokens if length else 0
            oldest = 0 if window is None else max(0, position + 1 - window)
            tiles = (oldest // division.block_n, -(-seen // division.block_n)) if length else (0, 0)
            yield QueryTile(min(sequence, len(lengths) - 1), row, num_tokens, position, *tiles)
