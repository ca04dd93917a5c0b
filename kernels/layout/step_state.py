"""State of running sequences on a device, slot by slot: its layout, and the plain twins of its kernels.

The Triton kernels are in `kernels/triton/step_state.py`.

The host describes a step in one buffer of i32, the *diff*: state changes, and the rows that run. A step's inputs are
made from the diff and the tables on the device, so chosen tokens need no round trip through the host. The layout of the
diff is here; `stages/backends/cuda/step_update.py` writes it.

numpy only. Every array may be a CPU tensor, whose memory is then written. S slots, L tokens a slot at most, M blocks a
slot, K kinds of blocks (`kv_layout.py`), P rows and N tokens of a step, padding included; R and T are the same without
padding. A step has at most P rows of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import finish_rule, sampling_rows

Array = Any  # a numpy array, or a tensor
Ints = NDArray[np.int32]

# -- the diff: a header, then sections at the offsets that the header gives

NUM_ROWS, NUM_TOKENS, NUM_LOGITS, NUM_ENTRIES, NUM_STARTED, NUM_RUNS = 0, 1, 2, 3, 4, 5
ROWS_AT, ENTRIES_AT, STARTED_AT, RUNS_AT = 6, 7, 8, 9
SIZE = 10  # numbers in the whole diff
HAS_DRAFTS = 11  # 1: each token of a row with logits has logits, in adjacent rows; else its last token has
HEADER = 16

# rows      slots [R], starts [R], offsets [R + 1] of their tokens in the step, logits [R]: first row of logits or -1
# entries   rows [E], places [E], blocks [E]: new entries of block tables; the row of slot s and kind k is k * S + s
# started   [C, 1 + STATE_WIDTH]: slot and state of sequences that start
# runs      slots [Q], starts [Q], ends [Q]: known tokens, which end at `ends` in the diff and are written from `starts`

# -- the state of a slot, [S, STATE_WIDTH] i32; floats are stored by their bits

# TOKENS: number of tokens so far. The sequence ends at LIMIT tokens, and on a stop token if it had LEAST before it.
TOKENS, LIMIT, LEAST, FINISHED, PROMPT = 0, 1, 2, 3, 4
DRAW = 5  # the beginning of a row of `sampling_rows`: seed, temperature and cuts
SEED_LOW, SEED_HIGH = DRAW + sampling_rows.SEED_LOW, DRAW + sampling_rows.SEED_HIGH
TEMPERATURE = DRAW + sampling_rows.TEMPERATURE
# ROPE_OFFSET: added to positions for rows of the rotary tables; only where `SlotState.has_rope_offsets`
ROPE_OFFSET = DRAW + sampling_rows.DRAW_WIDTH
ADAPTER = ROPE_OFFSET + 1  # the slot of the sequence's LoRA adapter, 0 without one; only where `SlotState.has_adapters`
STOPS = ROPE_OFFSET + 2  # stop token ids, padded with -1
MAX_STOPS = 8
STATE_WIDTH = STOPS + MAX_STOPS

# values of FINISHED
GOES_ON, STOP, LENGTH, ERROR = finish_rule.GOES_ON, finish_rule.STOP, finish_rule.LENGTH, finish_rule.ERROR


@dataclass(frozen=True, slots=True, eq=False)
class SlotState:
    """The state that stays on the device from step to step."""

    state: Array  # [S, STATE_WIDTH] i32
    tokens: Array  # [S, L] i32
    tables: Array  # [K * S, M] i32 block ids in token order, of kind 0 first
    has_rope_offsets: bool = False
    has_adapters: bool = False
    has_states: bool = False  # of recurrent layers, by slot

    @property
    def num_kinds(self) -> int:
        """K"""
        return len(self.tables) // len(self.state)


@dataclass(frozen=True, slots=True, eq=False)
class StepBuffers:
    """A step's inputs, refilled for each step: the decoder's, and the slot of each row of logits.

    Sized for the largest step; `of` gives the part for one step.
    """

    input_ids: Array  # [N] i64
    positions: Array  # [N] i64, with their ROPE_OFFSET
    slot_mapping: Array  # [N] i64, block * block_size + offset; -1 = none
    block_tables: Array  # [P, M] i32, entries past the length are not written
    query_starts: Array  # [P + 1] i32
    lengths: Array  # [P] i32, tokens in the cache, the new ones included; 0 = padding or finished
    logits_rows: Array  # [P] i64, which of the N tokens has these logits; 0 = unused
    sampled_slots: Array  # [P] i32, the slot of these logits; -1 = none
    next_positions: Array  # [P] i32, where in its sequence the token stands that these logits choose; 0 = unused
    runs: Array  # [P] i32, rows of logits of the same sequence from this one on: 1, more before drafts; 0 = unused
    adapters: Array  # [N] i32, slots of LoRA adapters, 0 = none; only where `SlotState.has_adapters`
    more_mappings: Array  # [K - 1, N] as `slot_mapping`, of the kinds of blocks after the first
    more_tables: Array  # [K - 1, P, M] as `block_tables`, likewise
    slots: Array  # [P] i64, the slot of each row, 0 in padding; only where `SlotState.has_states`

    def of(self, num_rows: int, num_tokens: int) -> StepBuffers:
        """The same memory, for `num_rows` rows and `num_tokens` tokens."""
        return StepBuffers(
            self.input_ids[:num_tokens],
            self.positions[:num_tokens],
            self.slot_mapping[:num_tokens],
            self.block_tables[:num_rows],
            self.query_starts[: num_rows + 1],
            self.lengths[:num_rows],
            self.logits_rows[:num_rows],
            self.sampled_slots[:num_rows],
            self.next_positions[:num_rows],
            self.runs[:num_rows],
            self.adapters[:num_tokens],
            self.more_mappings[:, :num_tokens],
            self.more_tables[:, :num_rows],
            self.slots[:num_rows],
        )


Make = Callable[[tuple[int, ...], str], Array]  # an array of zeros of a shape and a type


def make_slots(
    make: Make,
    num_slots: int,
    max_model_len: int,
    block_size: int,
    *,
    has_rope_offsets: bool = False,
    has_adapters: bool = False,
    has_states: bool = False,
    num_kinds: int = 1,
) -> SlotState:
    """State for `num_slots` sequences of at most `max_model_len` tokens, in blocks of `num_kinds` kinds."""
    return SlotState(
        state=make((num_slots, STATE_WIDTH), "int32"),
        tokens=make((num_slots, max_model_len), "int32"),
        tables=make((num_kinds * num_slots, -(-max_model_len // block_size)), "int32"),
        has_rope_offsets=has_rope_offsets,
        has_adapters=has_adapters,
        has_states=has_states,
    )


def make_buffers(make: Make, num_rows: int, num_tokens: int, blocks_per_slot: int, num_kinds: int = 1) -> StepBuffers:
    """Inputs for steps of at most `num_rows` rows and `num_tokens` tokens."""
    return StepBuffers(
        input_ids=make((num_tokens,), "int64"),
        positions=make((num_tokens,), "int64"),
        slot_mapping=make((num_tokens,), "int64"),
        block_tables=make((num_rows, blocks_per_slot), "int32"),
        query_starts=make((num_rows + 1,), "int32"),
        lengths=make((num_rows,), "int32"),
        logits_rows=make((num_rows,), "int64"),
        sampled_slots=make((num_rows,), "int32"),
        next_positions=make((num_rows,), "int32"),
        runs=make((num_rows,), "int32"),
        adapters=make((num_tokens,), "int32"),
        more_mappings=make((num_kinds - 1, num_tokens), "int64"),
        more_tables=make((num_kinds - 1, num_rows, blocks_per_slot), "int32"),
        slots=make((num_rows,), "int64"),
    )


def apply_updates(diff: Array, slots: SlotState) -> None:
    """Writes the updates of the diff into the tables: block table entries, sequences that start, known tokens."""
    d, state, tokens, tables = (np.asarray(x) for x in (diff, slots.state, slots.tokens, slots.tables))
    count, at = int(d[NUM_ENTRIES]), int(d[ENTRIES_AT])
    tables[d[at : at + count], d[at + count : at + 2 * count]] = d[at + 2 * count : at + 3 * count]
    count, at = int(d[NUM_STARTED]), int(d[STARTED_AT])
    started = d[at : at + count * (1 + STATE_WIDTH)].reshape(count, 1 + STATE_WIDTH)
    state[started[:, 0]] = started[:, 1:]
    count, at = int(d[NUM_RUNS]), int(d[RUNS_AT])
    first = at + 3 * count
    for run in range(count):
        slot, start, end = d[at + run], d[at + count + run], d[at + 2 * count + run]
        tokens[slot, start : start + end - first] = d[first:end]
        first = end


def make_inputs(diff: Array, slots: SlotState, buffers: StepBuffers, block_size: int) -> None:
    """Fills all of `buffers` with the rows of the diff, then padding.

    A sequence may have finished on the device before the host knows. Its row keeps its place, but reads and writes
    nothing in the cache, and its logits have no slot. With recurrent states it reads and writes as before, as the host
    may save the state behind the last token.
    """
    d, state, known, tables = (np.asarray(x) for x in (diff, slots.state, slots.tokens, slots.tables))
    out = StepBuffers(*(np.asarray(getattr(buffers, name)) for name in StepBuffers.__slots__))
    num_rows, num_tokens, at = int(d[NUM_ROWS]), int(d[NUM_TOKENS]), int(d[ROWS_AT])
    row_slots, starts = d[at : at + num_rows], d[at + num_rows : at + 2 * num_rows]
    offsets = d[at + 2 * num_rows : at + 3 * num_rows + 1]
    logits = d[at + 3 * num_rows + 1 : at + 4 * num_rows + 1]
    counts = offsets[1:] - offsets[:-1]
    goes_on = state[row_slots, FINISHED] == GOES_ON

    out.query_starts[:] = num_tokens
    out.query_starts[: num_rows + 1] = offsets
    out.lengths[:] = 0
    is_read = np.ones_like(goes_on) if slots.has_states else goes_on
    out.lengths[:num_rows] = np.where(is_read, starts + counts, 0)
    if slots.has_states:
        out.slots[:] = 0
        out.slots[:num_rows] = row_slots
    tables = tables.reshape(-1, len(state), tables.shape[1])  # [K, S, M]
    for row in range(num_rows):
        used = -(-int(out.lengths[row]) // block_size)
        out.block_tables[row, :used] = tables[0, row_slots[row], :used]
        out.more_tables[:, row, :used] = tables[1:, row_slots[row], :used]

    rows = np.repeat(np.arange(num_rows), counts)  # of each token
    positions = np.arange(num_tokens) - offsets[rows] + starts[rows]
    blocks = tables[:, row_slots[rows], positions // block_size].astype(np.int64)  # [K, T]
    out.positions[:], out.input_ids[:], out.slot_mapping[:], out.more_mappings[:] = 0, 0, -1, -1
    out.positions[:num_tokens] = positions
    if slots.has_rope_offsets:
        out.positions[:num_tokens] += state[row_slots[rows], ROPE_OFFSET]
    out.input_ids[:num_tokens] = known[row_slots[rows], positions]
    places = np.where(is_read[rows], blocks * block_size + positions % block_size, -1)
    out.slot_mapping[:num_tokens], out.more_mappings[:, :num_tokens] = places[0], places[1:]
    if slots.has_adapters:
        out.adapters[:] = 0
        out.adapters[:num_tokens] = np.where(goes_on[rows], state[row_slots[rows], ADAPTER], 0)

    out.logits_rows[:], out.sampled_slots[:], out.next_positions[:], out.runs[:] = 0, -1, 0, 0
    wanted = (logits >= 0).nonzero()[0]
    num_each = counts[wanted] if d[HAS_DRAFTS] else np.ones(len(wanted), np.int32)
    within = np.arange(num_each.sum()) - np.repeat(np.cumsum(num_each) - num_each, num_each)
    at = np.repeat(logits[wanted], num_each) + within
    out.logits_rows[at] = np.repeat(offsets[wanted + 1] - num_each, num_each) + within
    out.sampled_slots[at] = np.repeat(np.where(goes_on[wanted], row_slots[wanted], -1), num_each)
    out.next_positions[at] = positions[out.logits_rows[at]] + 1
    out.runs[at] = np.repeat(num_each, num_each) - within


def note_tokens(out: Array, chosen: Array, buffers: StepBuffers, slots: SlotState) -> None:
    """Records the chosen tokens in the slots' state and in `out`, the step's result for the host.

    out      [2, P] i32   token ids, -1 where no slot is sampled or the row does not count; then the value of FINISHED
    chosen   [P] i64      a token for each row of logits; negative = the row was broken, which ends its sequence
    buffers               of the step, as `make_inputs` made them

    A token ends its sequence by `finish_of` of `finish_rule.py`.

    The rows of a sequence with drafts are a run. They count up to the first whose token differs from the draft after
    it, or ends the sequence.
    """
    result, ids, at = np.asarray(out), np.asarray(chosen), np.asarray(buffers.sampled_slots)
    state, tokens, known = np.asarray(slots.state), np.asarray(slots.tokens), np.asarray(buffers.input_ids)
    places, runs, positions = (np.asarray(x) for x in (buffers.logits_rows, buffers.runs, buffers.next_positions))
    result[0], result[1] = -1, GOES_ON
    rows = (at >= 0).nonzero()[0]
    slot, is_broken, token = at[rows], ids[rows] < 0, np.maximum(ids[rows], 0).astype(np.int32)
    count = positions[rows]
    finish = np.where(count + 1 >= state[slot, LIMIT], LENGTH, GOES_ON)
    is_stop = (state[slot, STOPS : STOPS + MAX_STOPS] == token[:, None]).any(1) & (count >= state[slot, LEAST])
    finish = np.where(is_broken, ERROR, np.where(is_stop, STOP, finish))
    has_draft = runs[rows] > 1
    draft = known[np.where(has_draft, places[rows] + 1, 0)]
    is_right = has_draft & (finish == GOES_ON) & (token == draft)
    counts = _in_runs_so_far(is_right, runs[rows])
    last = counts & ~is_right
    fits = counts & (count < tokens.shape[1])
    tokens[slot[fits], count[fits]] = token[fits]
    state[slot[last], TOKENS], state[slot[last], FINISHED] = count[last] + 1, finish[last]
    result[0, rows[counts]], result[1, rows[counts]] = token[counts], finish[counts]


def _in_runs_so_far(is_right: NDArray[np.bool_], runs: Ints) -> NDArray[np.bool_]:
    """[n] whether all earlier rows of a row's run are right."""
    if not (runs > 1).any():
        return np.ones(len(runs), np.bool_)
    counts, before = np.ones(len(runs), np.bool_), 1
    for row, left in enumerate(runs.tolist()):
        counts[row] = before <= 1 or (counts[row - 1] and is_right[row - 1])
        before = left
    return counts
