"""Triton kernels that keep the state of running sequences on the device.

Their twins are in `kernels/layout/step_state.py`, which describes the diff and the state. Shapes: state
[S, STATE_WIDTH] i32, tokens [S, L] i32, block tables [K * S, M] i32, results [2, P] i32; S slots, P rows of a step, K
kinds of blocks.

Grids depend on the padded size of a step alone, so a captured graph serves every step of that size; the kernels read
the actual work from the diff. They move a few megabytes at most, so the launch dominates their cost.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from torch import Tensor

import triton
import triton.language as tl

from ..layout import finish_rule, step_state
from ..layout.step_state import SlotState, StepBuffers
from .launch import early_launch, next_power_of_2, start_early

UPDATE_PROGRAMS = 32  # they share the copy of a long prompt (128k tokens are 512 kB), and idle otherwise
BLOCK = 256
TOKENS_PER_PROGRAM = 32  # with 64 rows at a time: 2,048 comparisons, 16 a thread
ROWS_AT_A_TIME = 64
DRAFTS_AT_A_TIME = tl.constexpr(16)
ROWS_NOTED = 32  # rows of logits a program; with 8 rows of a run at a time, and 8 stop tokens, 16 comparisons a thread
RUN_AT_A_TIME = 8

NUM_ROWS, NUM_TOKENS, NUM_LOGITS = (
    tl.constexpr(value) for value in (step_state.NUM_ROWS, step_state.NUM_TOKENS, step_state.NUM_LOGITS)
)
NUM_ENTRIES, NUM_STARTED, NUM_RUNS = (
    tl.constexpr(value) for value in (step_state.NUM_ENTRIES, step_state.NUM_STARTED, step_state.NUM_RUNS)
)
HAS_DRAFTS = tl.constexpr(step_state.HAS_DRAFTS)
ROWS_AT, ENTRIES_AT = tl.constexpr(step_state.ROWS_AT), tl.constexpr(step_state.ENTRIES_AT)
STARTED_AT, RUNS_AT = tl.constexpr(step_state.STARTED_AT), tl.constexpr(step_state.RUNS_AT)
TOKENS, LIMIT, LEAST = (tl.constexpr(value) for value in (step_state.TOKENS, step_state.LIMIT, step_state.LEAST))
FINISHED, STOPS = tl.constexpr(step_state.FINISHED), tl.constexpr(step_state.STOPS)
ROPE_OFFSET, ADAPTER = tl.constexpr(step_state.ROPE_OFFSET), tl.constexpr(step_state.ADAPTER)
GOES_ON, STOP = tl.constexpr(finish_rule.GOES_ON), tl.constexpr(finish_rule.STOP)
LENGTH, ERROR = tl.constexpr(finish_rule.LENGTH), tl.constexpr(finish_rule.ERROR)


def apply_updates(diff: Tensor, slots: SlotState) -> None:
    """See `apply_updates` in `kernels/layout/step_state.py`."""
    _apply_updates_kernel[(UPDATE_PROGRAMS,)](
        diff, slots.state, slots.tokens, slots.tables,
        slots.state.stride(0), slots.tokens.stride(0), slots.tables.stride(0),
        WIDTH=step_state.STATE_WIDTH, BLOCK_WIDTH=next_power_of_2(step_state.STATE_WIDTH), BLOCK=BLOCK,
        enable_fp_fusion=True, **early_launch(diff.device),
    )  # fmt: skip


def make_inputs(diff: Tensor, slots: SlotState, buffers: StepBuffers, block_size: int) -> None:
    """See `make_inputs` in `kernels/layout/step_state.py`."""
    num_rows, num_tokens = len(buffers.lengths), len(buffers.input_ids)
    _rows_kernel[(num_rows,)](
        diff, slots.state, slots.tables, buffers.block_tables, buffers.query_starts, buffers.lengths,
        buffers.logits_rows, buffers.sampled_slots, buffers.next_positions, buffers.runs, buffers.more_tables,
        buffers.slots if slots.has_states else None, len(slots.state), slots.state.stride(0), slots.tables.stride(0),
        buffers.block_tables.stride(0), buffers.more_tables.stride(0), B=block_size, BLOCK=BLOCK,
        NUM_KINDS=slots.num_kinds, enable_fp_fusion=True, **early_launch(diff.device),
    )  # fmt: skip
    _tokens_kernel[(triton.cdiv(num_tokens, TOKENS_PER_PROGRAM),)](
        diff, slots.state, slots.tokens, slots.tables, buffers.input_ids, buffers.positions, buffers.slot_mapping,
        buffers.adapters if slots.has_adapters else None, buffers.more_mappings, num_tokens, len(slots.state),
        slots.state.stride(0), slots.tokens.stride(0), slots.tables.stride(0), buffers.more_mappings.stride(0),
        B=block_size, BLOCK_T=TOKENS_PER_PROGRAM, BLOCK_R=ROWS_AT_A_TIME, HAS_ROPE_OFFSETS=slots.has_rope_offsets,
        HAS_STATES=slots.has_states, NUM_KINDS=slots.num_kinds, enable_fp_fusion=True, **early_launch(diff.device),
    )  # fmt: skip


def note_tokens(out: Tensor, chosen: Tensor, buffers: StepBuffers, slots: SlotState) -> None:
    """See `note_tokens` in `kernels/layout/step_state.py`. A run belongs to the program of its first row."""
    num_rows = len(chosen)
    block = min(next_power_of_2(num_rows), ROWS_NOTED)
    _note_tokens_kernel[(triton.cdiv(num_rows, block),)](
        out, chosen, buffers.sampled_slots, buffers.next_positions, buffers.runs, buffers.logits_rows,
        buffers.input_ids, slots.state, slots.tokens, num_rows, slots.tokens.shape[1],
        out.stride(0), slots.state.stride(0), slots.tokens.stride(0), NUM_STOPS=step_state.MAX_STOPS, BLOCK=block,
        LANES=RUN_AT_A_TIME, enable_fp_fusion=True, **early_launch(out.device),
    )  # fmt: skip


@triton.jit
def _apply_updates_kernel(
    diff, state, tokens, tables, state_row, tokens_row, tables_row,
    WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    start_early(IS_EARLY)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    at, count = tl.load(diff + ENTRIES_AT), tl.load(diff + NUM_ENTRIES)
    for begin in range(program * BLOCK, count, num_programs * BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        is_entry = entry < count
        slot = tl.load(diff + at + entry, mask=is_entry, other=0).to(tl.int64)
        place = tl.load(diff + at + count + entry, mask=is_entry, other=0)
        block = tl.load(diff + at + 2 * count + entry, mask=is_entry, other=0)
        tl.store(tables + slot * tables_row + place, block, mask=is_entry)

    at, count = tl.load(diff + STARTED_AT), tl.load(diff + NUM_STARTED)
    column = tl.arange(0, BLOCK_WIDTH)
    for one in range(program, count, num_programs):
        source = diff + at + one * (1 + WIDTH)
        slot = tl.load(source).to(tl.int64)
        values = tl.load(source + 1 + column, mask=column < WIDTH, other=0)
        tl.store(state + slot * state_row + column, values, mask=column < WIDTH)

    at, count = tl.load(diff + RUNS_AT), tl.load(diff + NUM_RUNS)
    first = at + 3 * count
    for run in range(0, count):
        slot = tl.load(diff + at + run).to(tl.int64)
        start = tl.load(diff + at + count + run)
        end = tl.load(diff + at + 2 * count + run)
        for begin in range(program * BLOCK, end - first, num_programs * BLOCK):
            i = begin + tl.arange(0, BLOCK)
            ids = tl.load(diff + first + i, mask=i < end - first, other=0)
            tl.store(tokens + slot * tokens_row + start + i, ids, mask=i < end - first)
        first = end


@triton.jit
def _rows_kernel(
    diff, state, tables, block_tables, query_starts, lengths, logits_rows, sampled_slots, next_positions, runs,
    more_tables, row_slots, num_slots, state_row, tables_row, out_row, out_kind,
    B: tl.constexpr, BLOCK: tl.constexpr, NUM_KINDS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    start_early(IS_EARLY)
    row = tl.program_id(0)
    num_rows, num_tokens, num_logits = tl.load(diff + NUM_ROWS), tl.load(diff + NUM_TOKENS), tl.load(diff + NUM_LOGITS)
    rows = diff + tl.load(diff + ROWS_AT)
    is_row = row < num_rows
    slot = tl.load(rows + row, mask=is_row, other=0).to(tl.int64)
    start = tl.load(rows + num_rows + row, mask=is_row, other=0)
    offset = tl.load(rows + 2 * num_rows + row, mask=is_row, other=0)
    end = tl.load(rows + 2 * num_rows + row + 1, mask=is_row, other=0)
    goes_on = is_row & (tl.load(state + slot * state_row + FINISHED, mask=is_row, other=0) == GOES_ON)
    length = tl.where(goes_on if row_slots is None else is_row, start + end - offset, 0)
    if row_slots is not None:
        tl.store(row_slots + row, slot)
    tl.store(query_starts + row, tl.where(is_row, offset, num_tokens))
    tl.store(query_starts + row + 1, num_tokens, mask=row == tl.num_programs(0) - 1)
    tl.store(lengths + row, length)
    num_blocks = (length + B - 1) // B
    for begin in range(0, num_blocks, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        ids = tl.load(tables + slot * tables_row + place, mask=place < num_blocks, other=0)
        tl.store(block_tables + row.to(tl.int64) * out_row + place, ids, mask=place < num_blocks)
    for kind in tl.static_range(1, NUM_KINDS):
        table = tables + (slot + kind * num_slots) * tables_row
        out = more_tables + (kind - 1) * out_kind + row.to(tl.int64) * out_row
        for begin in range(0, num_blocks, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            tl.store(out + place, tl.load(table + place, mask=place < num_blocks, other=0), mask=place < num_blocks)

    # Rows of logits in use come first; each place is written by one program.
    tl.store(logits_rows + row, tl.zeros([], tl.int64), mask=row >= num_logits)
    tl.store(sampled_slots + row, -1, mask=row >= num_logits)
    tl.store(next_positions + row, 0, mask=row >= num_logits)
    tl.store(runs + row, 0, mask=row >= num_logits)
    first = tl.load(rows + 3 * num_rows + 1 + row, mask=is_row, other=-1)
    count = tl.where(tl.load(diff + HAS_DRAFTS) != 0, end - offset, 1)
    count = tl.where(first >= 0, count, 0)
    for begin in range(0, count, DRAFTS_AT_A_TIME):
        i = begin + tl.arange(0, DRAFTS_AT_A_TIME)
        tl.store(logits_rows + first + i, (end - count + i).to(tl.int64), mask=i < count)
        tl.store(sampled_slots + first + i, tl.where(goes_on, slot, -1).to(tl.int32) + tl.zeros_like(i), mask=i < count)
        tl.store(next_positions + first + i, start + end - offset - count + i + 1, mask=i < count)
        tl.store(runs + first + i, count - i, mask=i < count)


@triton.jit(do_not_specialize=["num_tokens"])
def _tokens_kernel(
    diff, state, tokens, tables, input_ids, positions, slot_mapping, adapters, more_mappings,
    num_tokens, num_slots, state_row, tokens_row, tables_row, mappings_kind,
    B: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, HAS_ROPE_OFFSETS: tl.constexpr,
    HAS_STATES: tl.constexpr, NUM_KINDS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    start_early(IS_EARLY)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    num_rows = tl.load(diff + NUM_ROWS)
    rows = diff + tl.load(diff + ROWS_AT)
    is_token = token < tl.load(diff + NUM_TOKENS)
    row = tl.zeros([BLOCK_T], tl.int32)  # the number of rows that end at or before the token
    for begin in range(0, num_rows, BLOCK_R):
        some = begin + tl.arange(0, BLOCK_R)
        ends = tl.load(rows + 2 * num_rows + 1 + some, mask=some < num_rows, other=2147483647)
        row += tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), axis=1)
    slot = tl.load(rows + row, mask=is_token, other=0).to(tl.int64)
    start = tl.load(rows + num_rows + row, mask=is_token, other=0)
    offset = tl.load(rows + 2 * num_rows + row, mask=is_token, other=0)
    goes_on = is_token & (tl.load(state + slot * state_row + FINISHED, mask=is_token, other=0) == GOES_ON)
    position = tl.where(is_token, token - offset + start, 0)
    ids = tl.load(tokens + slot * tokens_row + position, mask=is_token, other=0)
    is_read = is_token if HAS_STATES else goes_on
    block = tl.load(tables + slot * tables_row + position // B, mask=is_read, other=0).to(tl.int64)
    is_place = token < num_tokens  # padding included
    tl.store(input_ids + token, ids.to(tl.int64), mask=is_place)
    tl.store(slot_mapping + token, tl.where(is_read, block * B + position % B, -1), mask=is_place)
    for kind in tl.static_range(1, NUM_KINDS):
        table = tables + (slot + kind * num_slots) * tables_row
        other = tl.load(table + position // B, mask=is_read, other=0).to(tl.int64)
        out = more_mappings + (kind - 1) * mappings_kind + token
        tl.store(out, tl.where(is_read, other * B + position % B, -1), mask=is_place)
    if adapters is not None:
        adapter = tl.load(state + slot * state_row + ADAPTER, mask=goes_on, other=0)
        tl.store(adapters + token, adapter, mask=is_place)
    if HAS_ROPE_OFFSETS:
        position += tl.load(state + slot * state_row + ROPE_OFFSET, mask=is_token, other=0)
    tl.store(positions + token, position.to(tl.int64), mask=is_place)


@triton.jit(do_not_specialize=["num_rows", "max_tokens"])
def _note_tokens_kernel(
    out, chosen, sampled_slots, next_positions, runs, logits_rows, input_ids, state, tokens,
    num_rows, max_tokens, out_row, state_row, tokens_row,
    NUM_STOPS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    start_early(IS_EARLY)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_place = row < num_rows
    before = tl.load(runs + row - 1, mask=is_place & (row > 0), other=0)
    is_first = is_place & (before <= 1)  # of its run; each row of the padding is one
    size = tl.where(is_first, tl.maximum(tl.load(runs + row, mask=is_first, other=0), 1), 0)
    slot = tl.load(sampled_slots + row, mask=is_first, other=-1).to(tl.int64)
    is_run = slot >= 0
    place = state + slot * state_row
    limit = tl.load(place + LIMIT, mask=is_run, other=0)[:, None]
    least = tl.load(place + LEAST, mask=is_run, other=0)[:, None]
    column = tl.arange(0, NUM_STOPS)
    stops = tl.load(place[:, None] + STOPS + column[None, :], mask=is_run[:, None], other=-1)[:, None, :]
    goes_on = is_run  # all rows of the run so far are right
    for begin in range(0, tl.max(size, axis=0), LANES):
        lane = begin + tl.arange(0, LANES)[None, :]
        at = row[:, None] + lane
        is_lane = lane < size[:, None]
        is_row = is_lane & goes_on[:, None]
        choice = tl.load(chosen + at, mask=is_row, other=0)
        token = tl.maximum(choice, 0).to(tl.int32)
        count = tl.load(next_positions + at, mask=is_row, other=0)
        is_stop = tl.sum((stops == token[:, :, None]).to(tl.int32), axis=2) > 0
        finish = tl.where(is_stop & (count >= least), STOP, tl.where(count + 1 >= limit, LENGTH, GOES_ON))
        finish = tl.where(choice < 0, ERROR, finish)
        has_draft = is_row & (lane + 1 < size[:, None])
        source = tl.load(logits_rows + at, mask=has_draft, other=0) + 1
        draft = tl.load(input_ids + source, mask=has_draft, other=-1)
        is_right = has_draft & (finish == GOES_ON) & (token == draft)
        last = tl.min(tl.where(is_row & (is_right == 0), lane, 2147483647), axis=1)  # the last row that counts
        counts = is_row & (lane <= last[:, None])
        tl.store(tokens + slot[:, None] * tokens_row + count, token, mask=counts & (count < max_tokens))
        is_last = counts & (is_right == 0)
        here = place[:, None] + tl.zeros_like(lane)
        tl.store(here + TOKENS, count + 1, mask=is_last)
        tl.store(here + FINISHED, finish, mask=is_last)
        tl.store(out + at, tl.where(counts, token, -1), mask=is_lane)
        tl.store(out + out_row + at, tl.where(counts, finish, GOES_ON), mask=is_lane)
        goes_on &= last == 2147483647
