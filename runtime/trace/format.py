"""The trace: what happened in a pipeline, as 32-byte records in a memory-mapped ring per writing thread. Always on.

One format for the dashboard, Perfetto, OpenTelemetry, record, replay and simulation. A record is little-endian

    time_ns u64 | kind u16 | source u16 | step u32 | a u32 | b u32 | c u32 | d u32

with the env's monotonic time, and in `source`, as in fields that end in `_name`, the id of a name from the table in
the ring's header (stages, edges, causes). Durations end in `_us`, as 32 bits of nanoseconds would end at 4.3 s. A
value that does not fit is stored as the nearest that does. Numbers of kinds are never used again for something else.
The fields, `FIELDS` in code:

    kind              a              b                c                   d
    STAGE_BATCH       num_items      wait_us          service_us          blocked_us
    STAGE_RESTART     num_restarts   error_name
    EDGE_DEPTH        num_waiting    high_water       num_sent            full_us
    STALL             waited_us      num_waiting
    STEP_PLANNED      num_rows       num_tokens       num_running         num_waiting
    STEP_GRANTED      num_rows       num_tokens       num_decode_rows     num_free_blocks
    STEP_EXECUTED     num_rows       num_tokens       forward_us
    STEP_SAMPLED      num_rows       sample_us        grammar_us
    STEP_DONE         num_rows       num_finished     step_us
    STEP_VOID         num_rows       reason_name
    WAITING_FOR       num_waiting    num_running      reason_name
    STEP_DRAFTED      num_rows       num_drafts       num_accepted        num_running
    ROW_EXTEND        sequence_id    slot             start               num_tokens
    ROW_DECODE        sequence_id    slot             start
    ROW_LEAVE         sequence_id    slot
    REQUEST_NAME      sequence_id    text             text                text
    REQUEST_ACCEPTED  sequence_id    num_sequences    priority
    REQUEST_TOKENIZED sequence_id    num_prompt_tokens service_us
    REQUEST_ADMITTED  sequence_id    num_cached_tokens waited_us
    FIRST_TOKEN       sequence_id    waited_us
    REQUEST_FINISHED  sequence_id    cause_name       num_prompt_tokens   num_generated_tokens
    REQUEST_SHED      retry_after_ms num_waiting      reason_name
    REQUEST_STAGE     sequence_id    wait_us          service_us          blocked_us
    REQUEST_GRAMMAR   sequence_id    waited_us
    PREEMPTED         slot           how_name         num_blocks          num_tokens
    RESUMED           slot           how_name         num_blocks          num_tokens
    PARKED            slot           num_blocks       sequence_id
    UNPARKED          slot           num_blocks       sequence_id
    KV_RANGE          slot           first_block      num_blocks          state_name
    KV_POOL           num_free       num_in_use       num_cached          num_quarantined
    LOOP_LAG          lag_us
    GC_PAUSE          pause_us       generation       num_collected

STAGE_BATCH is written when the batch ends: it began `service_us + blocked_us` before, and its oldest item had then
waited `wait_us`; its `step` is that of its first item. REQUEST_STAGE says the same to each request in the batch, where
items are of one request. A request goes by the id of its first sequence. EDGE_DEPTH is written ten times a second
for edges that carried something, and counts from the last one on, `num_waiting` apart. A step's forward pass and its
sampling began `forward_us` and `sample_us` before their records: when the device could begin; of `sample_us`,
`grammar_us` was spent waiting for masks. WAITING_FOR says, when it changes, what the first in line lacks: slots,
blocks, swapped (blocks, to come back from the host), tokens (of the step), a turn, or "" when nobody waits.
STEP_DRAFTED is written, once the step is done, for those in which rows had drafts: they are none of the tokens that
STEP_GRANTED and the rows below tell of, and so many of them became tokens of their answers.

There is no record per token. Who took part in a step is told by changes only (`StepRows` writes them): ROW_EXTEND is a
row that computes prompt tokens [start, start + num_tokens) in this step alone, ROW_DECODE one that from this step on
computes one token a step, the first at position `start`, until the next ROW_EXTEND or ROW_LEAVE of its sequence; a
void step counts for nothing. `token_times` derives the token timeline. Memory records name slots, and the rows say
whose slot it is.

KV_RANGE says what the blocks [first_block, first_block + num_blocks) are from `step` on: `in_use` by a slot, in its
table; or, in no table, `free`, `cached` or `quarantined`, with NO_SLOT. With `left`, a slot holds none of its
`num_blocks` blocks any more, and first_block is 0. New blocks of steps that only go on are written some steps later,
before anything else that comes to pass with blocks. KV_POOL sums up after blocks have left tables, or come back to one;
in steady decoding STEP_GRANTED tells what is free.

Cost, on a 2-core machine with both cores busy, where an empty call of as many arguments takes 0.11 us:
`TraceRing.emit` 0.9 us, `Tracer.emit` 1.2 us, switched off 0.3 us; `emit_many` of 256 rows 0.4 us a row;
`StepRows.step` 10 us for 256 rows that go on decoding.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"MRTRACE\0"
VERSION = 1
MAX_U32 = 2**32 - 1
NO_SLOT = MAX_U32  # in place of a slot: of none

# The header: fixed part, then the table of names, then the records.
HEADER = struct.Struct("<8sIIQQQQQII64s")
HEADER_FIELDS = (
    *("magic", "version", "record_size", "capacity_events", "num_written", "num_begun"),
    *("base_monotonic_ns", "base_wall_ns", "num_names", "pid", "thread"),
)
NUM_WRITTEN_AT, NUM_BEGUN_AT, NUM_NAMES_AT = 24, 32, 56  # offsets of what changes
NAMES_AT = 4_096
MAX_NAMES, NAME_BYTES = 1_024, 64  # each name: its length in the first byte, then UTF-8, cut to 63 bytes
RECORDS_AT = NAMES_AT + MAX_NAMES * NAME_BYTES

RECORD = struct.Struct("<QHHIIIII")
RECORD_DTYPE = np.dtype(
    [("time_ns", "<u8"), ("kind", "<u2"), ("source", "<u2"), ("step", "<u4")] + [(name, "<u4") for name in "abcd"]
)
Records = npt.NDArray[np.void]  # of RECORD_DTYPE
WHOLE = np.dtype((np.void, RECORD_DTYPE.itemsize))  # a view as this is copied 20 times as fast as field by field
Column = npt.NDArray[np.integer[Any]]


class EventKind(IntEnum):
    """What a record tells; its fields are in `FIELDS`."""

    STAGE_BATCH = 1
    STAGE_RESTART = 2
    EDGE_DEPTH = 3
    STALL = 4

    STEP_PLANNED = 16
    STEP_GRANTED = 17
    STEP_EXECUTED = 18
    STEP_SAMPLED = 19
    STEP_DONE = 20
    STEP_VOID = 21
    WAITING_FOR = 22
    STEP_DRAFTED = 23

    ROW_EXTEND = 32
    ROW_DECODE = 33
    ROW_LEAVE = 34

    REQUEST_NAME = 48
    REQUEST_ACCEPTED = 49
    REQUEST_TOKENIZED = 50
    REQUEST_ADMITTED = 51
    FIRST_TOKEN = 52
    REQUEST_FINISHED = 53
    REQUEST_SHED = 54
    REQUEST_STAGE = 55
    REQUEST_GRAMMAR = 56

    PREEMPTED = 64
    RESUMED = 65
    PARKED = 66
    KV_RANGE = 67
    KV_POOL = 68
    UNPARKED = 69

    LOOP_LAG = 80
    GC_PAUSE = 81


# What a, b, c and d are. NOTE: the same table as above, which a test compares; docstrings may be stripped (-OO).
FIELDS: dict[EventKind, tuple[str, ...]] = {
    EventKind.STAGE_BATCH: ("num_items", "wait_us", "service_us", "blocked_us"),
    EventKind.STAGE_RESTART: ("num_restarts", "error_name"),
    EventKind.EDGE_DEPTH: ("num_waiting", "high_water", "num_sent", "full_us"),
    EventKind.STALL: ("waited_us", "num_waiting"),
    EventKind.STEP_PLANNED: ("num_rows", "num_tokens", "num_running", "num_waiting"),
    EventKind.STEP_GRANTED: ("num_rows", "num_tokens", "num_decode_rows", "num_free_blocks"),
    EventKind.STEP_EXECUTED: ("num_rows", "num_tokens", "forward_us"),
    EventKind.STEP_SAMPLED: ("num_rows", "sample_us", "grammar_us"),
    EventKind.STEP_DONE: ("num_rows", "num_finished", "step_us"),
    EventKind.STEP_VOID: ("num_rows", "reason_name"),
    EventKind.WAITING_FOR: ("num_waiting", "num_running", "reason_name"),
    EventKind.STEP_DRAFTED: ("num_rows", "num_drafts", "num_accepted", "num_running"),
    EventKind.ROW_EXTEND: ("sequence_id", "slot", "start", "num_tokens"),
    EventKind.ROW_DECODE: ("sequence_id", "slot", "start"),
    EventKind.ROW_LEAVE: ("sequence_id", "slot"),
    EventKind.REQUEST_NAME: ("sequence_id", "text", "text", "text"),
    EventKind.REQUEST_ACCEPTED: ("sequence_id", "num_sequences", "priority"),
    EventKind.REQUEST_TOKENIZED: ("sequence_id", "num_prompt_tokens", "service_us"),
    EventKind.REQUEST_ADMITTED: ("sequence_id", "num_cached_tokens", "waited_us"),
    EventKind.FIRST_TOKEN: ("sequence_id", "waited_us"),
    EventKind.REQUEST_FINISHED: ("sequence_id", "cause_name", "num_prompt_tokens", "num_generated_tokens"),
    EventKind.REQUEST_SHED: ("retry_after_ms", "num_waiting", "reason_name"),
    EventKind.REQUEST_STAGE: ("sequence_id", "wait_us", "service_us", "blocked_us"),
    EventKind.REQUEST_GRAMMAR: ("sequence_id", "waited_us"),
    EventKind.PREEMPTED: ("slot", "how_name", "num_blocks", "num_tokens"),
    EventKind.RESUMED: ("slot", "how_name", "num_blocks", "num_tokens"),
    EventKind.PARKED: ("slot", "num_blocks", "sequence_id"),
    EventKind.KV_RANGE: ("slot", "first_block", "num_blocks", "state_name"),
    EventKind.KV_POOL: ("num_free", "num_in_use", "num_cached", "num_quarantined"),
    EventKind.UNPARKED: ("slot", "num_blocks", "sequence_id"),
    EventKind.LOOP_LAG: ("lag_us",),
    EventKind.GC_PAUSE: ("pause_us", "generation", "num_collected"),
}
