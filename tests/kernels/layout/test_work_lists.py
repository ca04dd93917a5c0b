"""How a step's attention is cut into items, against what each new token sees."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.kernels.layout.list_work import HostWorkList, Ints, SplitTask, list_work
from millrace.kernels.layout.work_lists import (
    CUT_TILES,
    ITEM_TILES,
    MAX_FIXED_PIECES,
    MIN_TILES,
    AttentionShape,
    Division,
    WorkItem,
    decode_tiling,
    divide,
    extend_tiling,
)
from tests.counts import count

BLOCK_N = 8

batches = st.lists(st.tuples(st.sampled_from([0, 1, 1, 1, 2, 5, 30]), st.sampled_from([0, 0, 3, 64, 1000])), min_size=1)
windows = st.sampled_from([None, 1, BLOCK_N, 50])
programs = st.sampled_from([1, 2, 7, 100])
shortest = st.sampled_from([1, MIN_TILES])


def division_of(
    kind: str, num_sequences: int, num_tokens: int, num_programs: int, is_fixed: bool, min_tiles: int
) -> Division:
    sizes = (num_sequences, num_tokens, 2, 1 if kind == "decode" else 4, BLOCK_N, num_programs, is_fixed, min_tiles)
    return Division(kind, *sizes)  # type: ignore[arg-type]


def listed(
    rows: list[tuple[int, int]],
    num_tail: int,
    num_programs: int,
    window: int | None = None,
    is_fixed: bool = False,
    min_tiles: int = MIN_TILES,
) -> list[tuple[Division, HostWorkList]]:
    """The lists of a mixed batch. Sequences have so many new tokens after so many old ones; see `lengths_of`."""
    lengths, starts = lengths_of(rows), starts_of(rows)
    num_tokens = int(starts[-1]) + num_tail
    found = []
    for kind in ("decode", "extend"):
        division = division_of(kind, len(rows), num_tokens, num_programs, is_fixed, min_tiles)
        found.append((division, list_work(division, lengths, starts, window)))
    return found


def lengths_of(rows: list[tuple[int, int]]) -> torch.Tensor:
    """Every fourth sequence that holds nothing but new tokens is padding."""
    lengths = [
        0 if num_old == 0 and place % 4 == 3 else num_new + num_old for place, (num_new, num_old) in enumerate(rows)
    ]
    return torch.tensor(lengths, dtype=torch.int32)


def starts_of(rows: list[tuple[int, int]]) -> torch.Tensor:
    return torch.tensor([0, *(num_new for num_new, _ in rows)]).cumsum(0).int()


def tiles_of(items: Ints) -> Ints:
    return np.maximum(items[:, WorkItem.END_TILE] - items[:, WorkItem.FIRST_TILE], 1)


def is_whole(found: HostWorkList) -> bool:
    return not len(found.splits)


def tiles_seen(rows: list[tuple[int, int]], num_tail: int, window: int | None) -> Counter[tuple[int, int, int]]:
    """(row of q, key/value head, tile) for each tile that the row sees; tile -1 if it sees none."""
    lengths, starts = lengths_of(rows).tolist(), starts_of(rows).tolist()
    seen: Counter[tuple[int, int, int]] = Counter()
    for row in range(starts[-1] + num_tail):
        sequence = next((s for s in range(len(rows)) if starts[s] <= row < starts[s + 1]), None)
        tiles = {-1}
        if sequence is not None and lengths[sequence]:
            last = lengths[sequence] - starts[sequence + 1] + row
            first = 0 if window is None else max(0, last + 1 - window)
            tiles = {token // BLOCK_N for token in range(first, last + 1)}
        seen.update((row, g, tile) for g in range(2) for tile in tiles)
    return seen


@settings(max_examples=count(60, 2000), deadline=None)
@given(batches, st.sampled_from([0, 1, 9]), programs, windows, st.booleans())
def test_every_tile_that_a_row_sees_is_in_one_item(
    rows: list[tuple[int, int]], num_tail: int, num_programs: int, window: int | None, is_fixed: bool
) -> None:
    found: Counter[tuple[int, int, int]] = Counter()
    for _, (items, _, _) in listed(rows, num_tail, num_programs, window, is_fixed):
        for item in items.tolist():
            tiles = range(item[WorkItem.FIRST_TILE], item[WorkItem.END_TILE])
            for row in range(item[WorkItem.ROW], item[WorkItem.ROW] + item[WorkItem.NUM_TOKENS]):
                found.update((row, item[WorkItem.GROUP], tile) for tile in tiles or [-1])
    wanted = tiles_seen(rows, num_tail, window)
    assert not wanted - found
    assert set(found.values()) <= {1}
    # What is more is seen by a row of the same query tile, of 4 at most.
    for row, g, tile in found - wanted:
        assert any((row + step, g, tile) in wanted for step in range(-3, 4))


@settings(max_examples=count(60, 2000), deadline=None)
@given(batches, st.sampled_from([0, 9]), programs, windows, shortest)
def test_no_program_has_more_than_its_stretch_and_what_cuts_would_cost(
    rows: list[tuple[int, int]], num_tail: int, num_programs: int, window: int | None, min_tiles: int
) -> None:
    for division, found in listed(rows, num_tail, num_programs, window, False, min_tiles):
        items, starts, _ = found
        assert starts[0] == 0
        assert starts[-1] == len(items)
        tiles = tiles_of(items)
        is_first = items[:, WorkItem.PARTIAL] == items[:, WorkItem.FIRST_PARTIAL]  # of its task
        total = int(tiles.sum()) + division.item_tiles * int(is_first.sum())
        stretch = max(min_tiles + division.item_tiles, -(-total // num_programs))
        for first, end in zip(starts[:-1], starts[1:], strict=True):
            if is_whole(found) and division.kind == "extend":
                assert 0 <= tiles[first:end].sum() + ITEM_TILES * (end - first) <= stretch + CUT_TILES
            else:
                assert (
                    0 <= tiles[first:end].sum() + division.item_tiles * max(0, is_first[first:end].sum() - 1) <= stretch
                )


@settings(max_examples=count(60, 2000), deadline=None)
@given(batches, st.sampled_from([0, 9]), programs, windows, st.booleans())
def test_whole_extend_tasks_are_dealt_forth_and_back_the_longest_first(
    rows: list[tuple[int, int]], num_tail: int, num_programs: int, window: int | None, is_fixed: bool
) -> None:
    _, (_, found) = listed(rows, num_tail, num_programs, window, is_fixed)
    if not is_whole(found):
        assert not is_fixed
        return
    tiles, starts = tiles_of(found.items), found.starts.tolist()
    hands = [tiles[first:end].tolist() for first, end in zip(starts[:-1], starts[1:], strict=True)]
    dealt = [hand[turn] for turn in range(len(tiles)) for hand in hands[:: -1 if turn % 2 else 1] if turn < len(hand)]
    assert dealt == sorted(tiles.tolist(), reverse=True)
    assert max(map(len, hands)) - min(map(len, hands)) <= 1


@settings(max_examples=count(60, 2000), deadline=None)
@given(batches, st.sampled_from([0, 9]), programs, windows, st.booleans(), shortest)
def test_lists_stay_within_what_their_sizes_allow(
    rows: list[tuple[int, int]], num_tail: int, num_programs: int, window: int | None, is_fixed: bool, min_tiles: int
) -> None:
    for division, (items, _, splits) in listed(rows, num_tail, num_programs, window, is_fixed, min_tiles):
        assert len(items) <= division.max_items
        assert len(splits) <= division.max_splits
        partials = sorted(items[items[:, WorkItem.PARTIAL] >= 0, WorkItem.PARTIAL].tolist())
        assert partials == list(range(len(partials)))
        assert len(partials) == splits[:, SplitTask.NUM_PIECES].sum() <= division.max_partials


@settings(max_examples=count(60, 2000), deadline=None)
@given(batches, programs)
def test_the_pieces_of_a_cut_task_follow_each_other(rows: list[tuple[int, int]], num_programs: int) -> None:
    for _, (items, _, splits) in listed(rows, 0, num_programs):
        for row, num_tokens, g, first, num_pieces in splits.tolist():
            assert (items[items[:, WorkItem.FIRST_PARTIAL] == first, WorkItem.NUM_PIECES] == num_pieces).all()
            own = [
                next(item for item in items.tolist() if item[WorkItem.PARTIAL] == first + n) for n in range(num_pieces)
            ]
            assert {(item[WorkItem.ROW], item[WorkItem.NUM_TOKENS], item[WorkItem.GROUP]) for item in own} == {
                (row, num_tokens, g)
            }
            assert [item[WorkItem.END_TILE] for item in own[:-1]] == [item[WorkItem.FIRST_TILE] for item in own[1:]]


@settings(max_examples=count(60, 2000), deadline=None)
@given(batches, st.integers(0, 50), programs, programs, windows)
def test_in_batch_invariant_mode_a_sequence_is_cut_as_if_it_were_alone(
    rows: list[tuple[int, int]], place: int, num_programs: int, others: int, window: int | None
) -> None:
    place = place % len(rows)
    rows[place] = (rows[place][0], rows[place][1] + 1)  # no padding

    def own(found: list[tuple[Division, HostWorkList]], sequence: int, start: int) -> list[list[int]]:
        columns = [WorkItem.GROUP, WorkItem.FIRST_TILE, WorkItem.END_TILE, WorkItem.POSITION, WorkItem.NUM_TOKENS]
        lists = [items[items[:, WorkItem.SEQUENCE] == sequence] for _, (items, _, _) in found]
        return sorted([row[WorkItem.ROW] - start, *row[columns].tolist()] for items in lists for row in items)

    alone = listed([rows[place]], 0, num_programs, window, True)
    among = listed(rows, 0, others, window, True)
    assert own(alone, 0, 0) == own(among, place, int(starts_of(rows)[place]))


def test_a_long_sequence_is_cut_and_short_ones_are_not() -> None:
    # 25 tiles for each of 2 heads, and 1: 54 in all with the other sequence, 14 for each of 4 programs.
    (_, (items, starts, splits)), _ = listed([(1, 199), (1, 0), (1, 7)], 0, 4)
    assert items[
        :, [WorkItem.SEQUENCE, WorkItem.GROUP, WorkItem.FIRST_TILE, WorkItem.END_TILE, WorkItem.PARTIAL]
    ].tolist() == [
        [0, 0, 0, 14, 0],
        [0, 0, 14, 25, 1],
        [0, 1, 0, 3, 2],
        [0, 1, 3, 17, 3],
        [0, 1, 17, 25, 4],
        [1, 0, 0, 1, -1],
        [1, 1, 0, 1, -1],
        [2, 0, 0, 1, -1],
        [2, 1, 0, 1, -1],
    ]
    assert starts.tolist() == [0, 1, 3, 4, 9]
    assert splits.tolist() == [[0, 1, 0, 0, 2], [0, 1, 1, 2, 3]]


def test_a_prompt_is_dealt_whole_so_that_no_program_has_many_short_tasks() -> None:
    # 4 tokens a query tile, 8 keys a tile: tasks of 1, 1, 2, 2, .. 16, 16 tiles, for each of 2 heads.
    _, (_, (items, starts, _)) = listed([(128, 0)], 0, 16)
    assert np.diff(starts).tolist() == [4] * 16
    assert [sum(tiles_of(items)[first : first + 4]) for first in starts[:-1].tolist()] == [34] * 16
    assert tiles_of(items)[:8].tolist() == [16, 9, 8, 1, 16, 9, 8, 1]


def test_few_long_tasks_are_cut_as_dealing_them_would_leave_programs_without_work() -> None:
    # 2 tasks of 26 tiles: 31 with what an item costs, 9 at least a program on the line, and 8 for its cuts.
    _, (_, (items, _, splits)) = listed([(2, 200)], 0, 16)
    assert splits[:, SplitTask.NUM_PIECES].tolist() == [4, 3]
    assert tiles_of(items).tolist() == [4, 9, 9, 4, 9, 9, 8]
    _, (_, (items, _, splits)) = listed([(2, 86)], 0, 16)  # of 11 tiles: 16 with the item
    assert tiles_of(items).tolist() == [11, 11] and not len(splits)


def test_short_work_is_not_shredded() -> None:
    (_, (items, starts, splits)), _ = listed([(1, 63)], 0, 100)  # 8 tiles for each of 2 heads
    assert (items[:, WorkItem.END_TILE] - items[:, WorkItem.FIRST_TILE]).tolist() == [MIN_TILES] * 4
    assert starts[:6].tolist() == [0, 1, 2, 3, 4, 4]
    assert len(splits) == 2


def test_decode_of_few_rows_is_cut_into_single_tiles() -> None:
    shape = AttentionShape(16, 8, 128, torch.bfloat16, torch.bfloat16)
    fixed = replace(shape, is_batch_invariant=True)
    tiling = decode_tiling(shape, 90)
    for num_rows, of, min_tiles in ((1, shape, 1), (24, shape, 1), (25, shape, MIN_TILES), (1, fixed, MIN_TILES)):
        assert divide("decode", of, tiling, num_rows, num_rows, 132).min_tiles == min_tiles  # of 396 programs
    assert divide("extend", shape, extend_tiling(shape, 90), 1, 9, 132).min_tiles == MIN_TILES
    items, starts, _ = list_work(divide("decode", shape, tiling, 1, 1, 132), torch.tensor([1024]), None, None)
    assert len(items) == 128 and starts[:129].tolist() == list(range(129))


def test_long_contexts_have_a_bounded_number_of_pieces_in_batch_invariant_mode() -> None:
    (_, (items, _, splits)), _ = listed([(1, 10_000)], 0, 3, None, True)
    assert splits[:, SplitTask.NUM_PIECES].tolist() == [MAX_FIXED_PIECES] * 2
    assert len(items) == 2 * MAX_FIXED_PIECES


def test_a_decode_tile_holds_the_whole_group() -> None:
    wide = AttentionShape(71, 1, 64, torch.bfloat16, torch.bfloat16)
    assert decode_tiling(wide, 90).block_m == 128
    assert divide("extend", wide, extend_tiling(wide, 90), 1, 1, 1).tokens_per_tile == 1
