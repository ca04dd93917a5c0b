"""The Triton kernel that makes a step's work lists of attention on the device.

Its twin is `list_work` in `kernels/layout/list_work.py`; `kernels/layout/work_lists.py` describes the lists. Shapes:
lengths [S] i32, query starts [S + 1] i32; S sequences.

A launch makes the lists of all layers of one window: one program that of decode, another that of extend.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from .launch import start_early


@triton.jit(
    do_not_specialize=[
        *("num_sequences", "num_tokens", "window", "decode_tasks", "extend_tasks", "query_tiles"),
        *("decode_programs", "extend_programs"),
    ],
    do_not_specialize_on_alignment=["query_starts", "lengths"],
)
def list_kernel(
    decode_items, decode_begins, decode_starts, decode_arrivals, decode_counts,
    extend_items, extend_begins, extend_starts, extend_arrivals, extend_counts, extend_keys,
    query_starts, lengths, num_sequences, num_tokens, window, decode_tasks, extend_tasks, query_tiles,
    decode_programs, extend_programs,
    NUM_GROUPS: tl.constexpr, TOKENS: tl.constexpr, DECODE_N: tl.constexpr, EXTEND_N: tl.constexpr,
    HAS_DECODE: tl.constexpr, IS_MIXED: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_FIXED: tl.constexpr,
    FIXED_PIECES: tl.constexpr, DECODE_MIN: tl.constexpr, EXTEND_MIN: tl.constexpr, ITEM_TILES: tl.constexpr,
    CUT_TILES: tl.constexpr,
    ITEM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_J: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program makes the list of decode, the other that of extend; without decode, the only one that of all.

    NOTE: the counters of arrivals are set to zero here, once a step, and only count up then. If the kernels that count
    set them back, a step that died halfway would leave them wrong for ever.
    """
    start_early(IS_EARLY)
    if HAS_DECODE and tl.program_id(0) == 0:
        total = _total_cost(
            decode_counts, query_starts, lengths, num_sequences, num_tokens, window, decode_tasks,
            NUM_GROUPS, 1, DECODE_N, False, IS_MIXED, HAS_WINDOW, 0, BLOCK,
        )  # fmt: skip
        _list_line(
            decode_items, decode_begins, decode_starts, decode_arrivals, decode_counts, query_starts, lengths,
            num_sequences, num_tokens, window, decode_tasks, decode_programs,
            tl.maximum(tl.cdiv(total, decode_programs), DECODE_MIN),
            NUM_GROUPS, 1, DECODE_N, False, IS_MIXED, HAS_WINDOW, FIXED_PIECES if IS_FIXED else 0, DECODE_MIN,
            0, ITEM, BLOCK,
        )  # fmt: skip
    elif IS_MIXED:
        total = _total_cost(
            extend_keys, query_starts, lengths, num_sequences, num_tokens, window, query_tiles,
            1, TOKENS, EXTEND_N, True, HAS_DECODE, HAS_WINDOW, ITEM_TILES, BLOCK,
        ) * NUM_GROUPS  # fmt: skip
        stretch = tl.maximum(tl.cdiv(total, extend_programs), EXTEND_MIN + ITEM_TILES)
        longest = _list_whole(
            extend_items, extend_begins, extend_starts, extend_counts, extend_keys, query_starts, lengths,
            num_sequences, num_tokens, window, query_tiles, extend_programs,
            NUM_GROUPS, TOKENS, EXTEND_N, HAS_DECODE, HAS_WINDOW, ITEM_TILES, ITEM, BLOCK, BLOCK_J,
        )  # fmt: skip
        if not IS_FIXED and longest > stretch + CUT_TILES:
            tl.debug_barrier()  # other threads read what is written over
            _list_line(
                extend_items, extend_begins, extend_starts, extend_arrivals, extend_counts, query_starts, lengths,
                num_sequences, num_tokens, window, extend_tasks, extend_programs, stretch,
                NUM_GROUPS, TOKENS, EXTEND_N, True, HAS_DECODE, HAS_WINDOW, 0, EXTEND_MIN, ITEM_TILES, ITEM, BLOCK,
            )  # fmt: skip


@triton.jit
def _total_cost(
    keys, query_starts, lengths, num_sequences, num_tokens, window, num_tasks,
    NUM_GROUPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, IS_EXTEND: tl.constexpr,
    IS_MIXED: tl.constexpr, HAS_WINDOW: tl.constexpr, ITEM_TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The cost of all tasks. For extend, tasks are query tiles, and their keys are written: no two are equal.

    A larger key is that of a costlier tile, or of an earlier one of the same cost; -1 is no tile.
    """
    total = 0
    for first in range(0, num_tasks, BLOCK):
        task = first + tl.arange(0, BLOCK)
        _, _, _, _, _, _, cost = _query_tile(
            query_starts, lengths, task, num_sequences, num_tokens, window, num_tasks,
            NUM_GROUPS, TOKENS, BLOCK_N, IS_EXTEND, IS_MIXED, HAS_WINDOW,
        )  # fmt: skip
        total += tl.sum(tl.where(cost > 0, cost + ITEM_TILES, 0), axis=0)
        if IS_EXTEND:
            key = tl.where(cost > 0, cost * num_tasks + num_tasks - 1 - task, -1)
            tl.store(keys + task, key, mask=task < num_tasks)
    return total


@triton.jit
def _list_whole(
    items, begins, starts, counts, keys, query_starts, lengths,
    num_sequences, num_tokens, window, query_tiles, num_programs,
    NUM_GROUPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, IS_MIXED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, ITEM_TILES: tl.constexpr, ITEM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Deals whole tasks in the order of keys: forth over the programs, and back. Returns the most of one program."""
    tl.debug_barrier()  # other threads wrote the keys read below
    num_tiles = 0
    for first in range(0, query_tiles, BLOCK):
        task = first + tl.arange(0, BLOCK)
        key = tl.load(keys + task, mask=task < query_tiles, other=-1)
        num_tiles += tl.sum((key >= 0).to(tl.int32), axis=0)
    num_items = num_tiles * NUM_GROUPS
    turns = num_items // num_programs  # whole ones
    rest = num_items - turns * num_programs
    for first in range(0, query_tiles, BLOCK):
        task = first + tl.arange(0, BLOCK)
        key = tl.load(keys + task, mask=task < query_tiles, other=-1)
        rank = tl.zeros_like(task)
        for other in range(0, query_tiles, BLOCK_J):
            column = other + tl.arange(0, BLOCK_J)
            others = tl.load(keys + column, mask=column < query_tiles, other=-1)
            rank += tl.sum((others[None, :] > key[:, None]).to(tl.int32), axis=1)
        sequence, row, tokens, position, low, high, cost = _query_tile(
            query_starts, lengths, task, num_sequences, num_tokens, window, query_tiles,
            1, TOKENS, BLOCK_N, True, IS_MIXED, HAS_WINDOW,
        )  # fmt: skip
        is_tile = key >= 0
        for g in range(0, NUM_GROUPS):
            index = rank * NUM_GROUPS + g
            turn = index // num_programs
            place = index - turn * num_programs
            program = tl.where(turn % 2 == 0, place, num_programs - 1 - place)
            index = _first_dealt(program, turns, rest, num_programs) + turn
            item = items + index * ITEM
            tl.store(item, sequence, mask=is_tile)
            tl.store(item + 1, row, mask=is_tile)
            tl.store(item + 2, g, mask=is_tile)
            tl.store(item + 3, low, mask=is_tile)
            tl.store(item + 4, high, mask=is_tile)
            tl.store(item + 5, -1, mask=is_tile)
            tl.store(item + 6, position, mask=is_tile)
            tl.store(item + 7, tokens, mask=is_tile)
            tl.store(item + 8, -1, mask=is_tile)
            tl.store(item + 9, 1, mask=is_tile)
            tl.store(begins + index, cost + ITEM_TILES, mask=is_tile)
    tl.store(counts, num_items)
    tl.store(counts + 1, 0)

    tl.debug_barrier()  # other threads wrote the costs read below
    longest = 0
    for first in range(0, num_programs + 1, BLOCK):
        program = first + tl.arange(0, BLOCK)
        index = _first_dealt(program, turns, rest, num_programs)
        tl.store(starts + program, index, mask=program <= num_programs)
        end = _first_dealt(program + 1, turns, rest, num_programs)
        cost = tl.zeros_like(program)
        for _turn in range(0, turns + 1):
            cost += tl.load(begins + index, mask=(program < num_programs) & (index < end), other=0)
            index += 1
        longest = tl.maximum(longest, tl.max(cost, axis=0))
    return longest


@triton.jit
def _first_dealt(program, turns, rest, num_programs):
    """The items of the programs before it, after so many whole turns and `rest` items more."""
    more = tl.where(turns % 2 == 0, tl.minimum(program, rest), tl.maximum(program - num_programs + rest, 0))
    return program * turns + more


@triton.jit
def _list_line(
    items, begins, starts, arrivals, counts, query_starts, lengths,
    num_sequences, num_tokens, window, num_tasks, num_programs, stretch,
    NUM_GROUPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, IS_EXTEND: tl.constexpr,
    IS_MIXED: tl.constexpr, HAS_WINDOW: tl.constexpr, FIXED_PIECES: tl.constexpr, MIN_TILES: tl.constexpr,
    ITEM_TILES: tl.constexpr, ITEM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the items of tasks that lie end to end on a line, cut at the ends of stretches; BLOCK tasks at a time."""
    task = tl.arange(0, BLOCK)
    line = 0  # its length so far
    num_items = 0
    num_splits = 0
    num_partials = 0
    for first in range(0, num_tasks, BLOCK):
        sequence, row, tokens, position, low, high, cost = _query_tile(
            query_starts, lengths, first + task, num_sequences, num_tokens, window, num_tasks,
            NUM_GROUPS, TOKENS, BLOCK_N, IS_EXTEND, IS_MIXED, HAS_WINDOW,
        )  # fmt: skip
        g = (first + task) % NUM_GROUPS
        space = tl.where(cost > 0, cost + ITEM_TILES, 0)
        begin = line + tl.cumsum(space, 0) - cost
        if FIXED_PIECES > 0:
            share = tl.maximum(tl.cdiv(cost, FIXED_PIECES), MIN_TILES)
            pieces = tl.cdiv(cost, share)
            cut = begin  # where piece 0 would begin at full length
        else:
            share = tl.zeros_like(cost) + stretch
            cut = begin // stretch * stretch
            pieces = tl.where(cost > 0, (begin + cost - 1) // stretch - begin // stretch + 1, 0)
        item = num_items + tl.cumsum(pieces, 0) - pieces
        is_split = pieces > 1
        split_pieces = tl.where(is_split, pieces, 0)
        partial = num_partials + tl.cumsum(split_pieces, 0) - split_pieces
        tl.store(arrivals + partial, 0, mask=is_split)
        for piece in range(0, tl.max(pieces, axis=0)):
            is_piece = piece < pieces
            piece_begin = tl.maximum(begin, cut + piece * share)
            piece_end = tl.minimum(begin + cost, cut + (piece + 1) * share)
            place = items + (item + piece) * ITEM
            tl.store(place, sequence, mask=is_piece)
            tl.store(place + 1, row, mask=is_piece)
            tl.store(place + 2, g, mask=is_piece)
            tl.store(place + 3, low + piece_begin - begin, mask=is_piece)
            tl.store(place + 4, tl.minimum(high, low + piece_end - begin), mask=is_piece)
            tl.store(place + 5, tl.where(is_split, partial + piece, -1), mask=is_piece)
            tl.store(place + 6, position, mask=is_piece)
            tl.store(place + 7, tokens, mask=is_piece)
            tl.store(place + 8, tl.where(is_split, partial, -1), mask=is_piece)
            tl.store(place + 9, pieces, mask=is_piece)
            tl.store(begins + item + piece, piece_begin, mask=is_piece)
        line += tl.sum(space, axis=0)
        num_items += tl.sum(pieces, axis=0)
        num_splits += tl.sum(is_split.to(tl.int32), axis=0)
        num_partials += tl.sum(split_pieces, axis=0)
    tl.store(counts, num_items)
    tl.store(counts + 1, num_splits)

    tl.debug_barrier()  # other threads of the program wrote the numbers read below
    for first in range(0, num_programs + 1, BLOCK):
        program = first + task
        # The first item that begins on or after the program's stretch of the line, by bisection.
        low = tl.zeros_like(program)
        high = low + num_items
        is_open = low < high
        while tl.max(is_open.to(tl.int32), axis=0) > 0:
            middle = (low + high) // 2
            is_before = tl.load(begins + middle, mask=is_open, other=0) < program * stretch
            low = tl.where(is_open & is_before, middle + 1, low)
            high = tl.where(is_open & (is_before == 0), middle, high)
            is_open = low < high
        tl.store(starts + program, low, mask=program <= num_programs)


@triton.jit
def _query_tile(
    query_starts, lengths, task, num_sequences, num_tokens, window, num_tasks,
    NUM_GROUPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, IS_EXTEND: tl.constexpr,
    IS_MIXED: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """The query tiles of some tasks: sequence, row, tokens, position, tiles [low, high), and cost (0 = no task).

    IS_MIXED: another list has the sequences of one new token, or all but those.
    """
    tile = task // NUM_GROUPS
    is_tile = task < num_tasks
    if IS_EXTEND:
        low = tl.zeros_like(tile)  # the last sequence whose tiles begin at or before this one, by bisection
        high = low + num_sequences + 1
        is_open = low < high
        while tl.max(is_open.to(tl.int32), axis=0) > 0:
            middle = (low + high) // 2
            is_before = tl.load(query_starts + middle, mask=is_open, other=0) // TOKENS + middle <= tile
            low = tl.where(is_open & is_before, middle + 1, low)
            high = tl.where(is_open & (is_before == 0), middle, high)
            is_open = low < high
        sequence = low - 1
        is_own = is_tile & (sequence < num_sequences)  # else rows past the last sequence
        start = tl.load(query_starts + sequence, mask=is_tile, other=0)
        end = tl.load(query_starts + sequence + 1, mask=is_own, other=0)
        end = tl.where(is_own, end, num_tokens)
        row = start + (tile - start // TOKENS - sequence) * TOKENS
        is_tile = is_tile & (row < end)
        if IS_MIXED:
            is_tile = is_tile & ((end - start != 1) | (sequence == num_sequences))
        length = tl.load(lengths + sequence, mask=is_own, other=0)
    else:
        sequence = tile
        row = tile
        end = row + 1
        if IS_MIXED:
            row = tl.load(query_starts + sequence, mask=is_tile, other=0)
            end = tl.load(query_starts + sequence + 1, mask=is_tile, other=0)
            is_tile = is_tile & (end - row == 1)
        length = tl.load(lengths + sequence, mask=is_tile, other=0)
    tokens = tl.minimum(end - row, TOKENS)
    position = length - (end - row)
    low = tl.zeros_like(row)
    if HAS_WINDOW:
        low = tl.where(length > 0, tl.maximum(position + 1 - window, 0) // BLOCK_N, 0)
    high = tl.where(length > 0, (position + tokens + BLOCK_N - 1) // BLOCK_N, 0)
    cost = tl.where(is_tile, tl.maximum(high - low, 1), 0)
    return tl.minimum(sequence, num_sequences - 1), row, tokens, position, low, high, cost
