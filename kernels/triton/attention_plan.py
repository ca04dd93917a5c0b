"""The Triton kernel that makes a step's attention work lists on the device.

Its twin is `list_work` in `kernels/layout/work_lists.py`, which describes the lists. Shapes: lengths [S] i32, query
starts [S + 1] i32; S sequences.

The host reads no length, and launches depend on sizes alone. One program makes a list, once a step, for all layers of
one window.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..layout.work_lists import (
    AttentionPlan,
    AttentionShape,
    Division,
    Tiling,
    WorkItem,
    WorkList,
    decode_tiling,
    divide,
    extend_tiling,
    partials_size,
    table_sizes,
)
from .launch import capability, early_launch, num_multiprocessors, start_early

BLOCK = 512  # tasks processed at a time


def plan_attention(
    shape: AttentionShape,
    lengths: Tensor,
    query_starts: Tensor | None,
    num_tokens: int,
    num_processors: int | None = None,
) -> AttentionPlan:
    """See `KernelSet.plan_attention`. Returns the work lists of the step, on the device of `lengths`.

    Its memory (`workspace_bytes`) depends on S, T and the device alone. So a replayed CUDA graph remakes the lists in
    place, from the current lengths.
    """
    processors = num_processors or num_multiprocessors(lengths.device)
    divided = _divisions(shape, len(lengths), num_tokens, query_starts is None, processors, lengths.device)
    lists = [
        {window: _make_list(division, tiling, lengths, query_starts, window) for window in shape.windows}
        for division, tiling in divided
    ]
    partials = torch.empty(_num_partials(shape, divided), dtype=torch.float32, device=lengths.device)
    return AttentionPlan(lists[0], lists[1] if len(lists) > 1 else {}, partials)


def workspace_bytes(
    shape: AttentionShape,
    num_sequences: int,
    num_tokens: int,
    is_decode: bool,
    device: torch.device,
    num_processors: int | None = None,
) -> int:
    """Device memory that `plan_attention` takes for a step of this size, for any lengths."""
    processors = num_processors or num_multiprocessors(device)
    divided = _divisions(shape, num_sequences, num_tokens, is_decode, processors, device)
    tables = sum(sum(table_sizes(division)) for division, _ in divided) * len(shape.windows)
    return 4 * (tables + _num_partials(shape, divided))


def _num_partials(shape: AttentionShape, divided: list[tuple[Division, Tiling]]) -> int:
    """Size of the partial sums in numbers: of the larger list, as lists and layers run one after another."""
    return max(partials_size(division, shape) for division, _ in divided)


def _divisions(
    shape: AttentionShape,
    num_sequences: int,
    num_tokens: int,
    is_decode: bool,
    num_processors: int,
    device: torch.device,
) -> list[tuple[Division, Tiling]]:
    """The sizes of a step's lists: decode, then extend unless every sequence has exactly one new token."""
    tiling = decode_tiling(shape, capability(device))
    found = [(divide("decode", shape, tiling, num_sequences, num_tokens, num_processors), tiling)]
    if not is_decode:
        tiling = extend_tiling(shape, capability(device))
        found.append((divide("extend", shape, tiling, num_sequences, num_tokens, num_processors), tiling))
    return found


def _make_list(
    division: Division, tiling: Tiling, lengths: Tensor, query_starts: Tensor | None, window: int | None
) -> WorkList:
    sizes = table_sizes(division)
    tables = torch.empty(sum(sizes), dtype=torch.int32, device=lengths.device)
    items, begins, starts, arrivals, counts = tables.split_with_sizes(sizes)
    if division.max_tasks:
        _list_kernel[(1,)](
            items, begins, starts, arrivals, counts, lengths if query_starts is None else query_starts, lengths,
            division.num_sequences, division.num_tokens, window or 0, division.max_tasks, division.num_programs,
            NUM_GROUPS=division.num_groups, TOKENS=division.tokens_per_tile, BLOCK_N=division.block_n,
            IS_EXTEND=division.kind == "extend", IS_MIXED=query_starts is not None, HAS_WINDOW=window is not None,
            FIXED_PIECES=division.max_pieces if division.is_fixed else 0, MIN_TILES=division.min_tiles,
            ITEM=len(WorkItem), BLOCK=BLOCK, num_warps=4, enable_fp_fusion=True,
            **early_launch(lengths.device),
        )  # fmt: skip
    return WorkList(
        division,
        tiling,
        items[: division.max_items * len(WorkItem)].view(-1, len(WorkItem)),
        starts[: division.num_programs + 1],
        arrivals[: division.max_partials],
        counts[:2],
    )


@triton.jit(
    do_not_specialize=["num_sequences", "num_tokens", "window", "num_tasks", "num_programs"],
    do_not_specialize_on_alignment=["query_starts", "lengths"],
)
def _list_kernel(
    items, begins, starts, arrivals, counts, query_starts, lengths,
    num_sequences, num_tokens, window, num_tasks, num_programs,
    NUM_GROUPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, IS_EXTEND: tl.constexpr,
    IS_MIXED: tl.constexpr, HAS_WINDOW: tl.constexpr, FIXED_PIECES: tl.constexpr, MIN_TILES: tl.constexpr,
    ITEM: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Sums the costs of all tasks, then writes their items, BLOCK tasks at a time. One program.

    NOTE: the counters of arrivals are set to zero here, once a step, and only count up then. If the kernels that count
    set them back, a step that died halfway would leave them wrong for ever.
    """
    start_early(IS_EARLY)
    task = tl.arange(0, BLOCK)
    total = 0
    for first in range(0, num_tasks, BLOCK):
        _, _, _, _, _, _, cost = _query_tile(
            query_starts, lengths, first + task, num_sequences, num_tokens, window, num_tasks,
            NUM_GROUPS, TOKENS, BLOCK_N, IS_EXTEND, IS_MIXED, HAS_WINDOW,
        )  # fmt: skip
        total += tl.sum(cost, axis=0)
    stretch = tl.maximum(tl.cdiv(total, num_programs), MIN_TILES)

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
        begin = line + tl.cumsum(cost, 0) - cost
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
        line += tl.sum(cost, axis=0)
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
    """The query tiles of some tasks: sequence, row, tokens, position, tiles [low, high), and cost (0 = no task)."""
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
        is_tile = is_tile & (row < end) & ((end - start != 1) | (sequence == num_sequences))
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
