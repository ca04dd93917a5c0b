"""The format of the trace: 32-byte records in a memory-mapped ring per writing thread.

Always on.

One format serves the dashboard, Perfetto, OpenTelemetry, recording, replay and simulation. A record is little-endian:

    time_ns u64 | kind u16 | source u16 | step u32 | a u32 | b u32 | c u32 | d u32

The time is the env's monotonic time. `source`, and each field that ends in `_name`, is the id of a name in the table in
the ring's header (stages, edges, causes). Durations end in `_us`: 32 bits of nanoseconds would end at 4.3 s. A value
that does not fit is stored as the nearest that does. Numbers of kinds are never reused. The fields, `FIELDS` in code:


    kind              a              b                c                   d
    STAGE_BATCH       num_items      wait_us          service_us          blocked_us
    STAGE_RESTART     num_restarts   error_name
    EDGE_DEPTH        num_waiting    high_water       num_sent            full_us
    STALL             waited_us      num_waiting
    STAGE_TIME        busy_us        blocked_us     idle_us
    STEP_PLANNED      num_rows       num_tokens       num_running         num_waiting
    STEP_GRANTED      num_rows       num_tokens       num_decode_rows     num_free_blocks
    STEP_EXECUTED     num_rows       num_tokens       forward_us
    STEP_SAMPLED      num_rows       sample_us        grammar_us
    STEP_DONE         num_rows       num_finished     step_us
    STEP_VOID         num_rows       reason_name
    WAITING_FOR       num_waiting    num_running      reason_name
    STEP_DRAFTED      num_rows       num_drafts       num_accepted        num_running
    ROW_EXTEND        sequence_id    slot             start               num_tokens
    ROW_DECODE        sequence_id    slot             start               num_lanes
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
    REQUEST_ADAPTER   sequence_id    waited_us
    SET_ASIDE         sequence_id    is_aside
    PREEMPTED         slot           how_name         num_blocks          num_tokens
    RESUMED           slot           how_name         num_blocks          num_tokens
    PARKED            slot           num_blocks       sequence_id
    UNPARKED          slot           num_blocks       sequence_id
    KV_RANGE          slot           first_block      num_blocks          state_name
    KV_POOL           num_free       num_in_use       num_cached          num_quarantined
    LOOP_LAG          lag_us
    GC_PAUSE          pause_us       generation       num_collected

STAGE_BATCH is written when the batch ends. It began `service_us + blocked_us` before, and its oldest item had waited
`wait_us` by then. Its `step` is that of its first item. REQUEST_STAGE has the same times for each request in the batch,
if its items belong to one request each. A request is named by the id of its first sequence.

EDGE_DEPTH is written ten times a second for edges that carried something. Its fields except `num_waiting` count since
the edge's last record. STAGE_TIME is written as often, for stages that were not idle. It says how the time since the
last writing was spent, which ends at the record: the one attribution of `StageTimes`. Where a stage waits for another
one, as sample does for a forward pass, STAGE_BATCH says that `handle` had something, and STAGE_TIME which stage worked.

A step's forward pass and its sampling began `forward_us` and `sample_us` before their records: when the device could
begin. `grammar_us` is the time spent waiting for masks. An asynchronous device writes STEP_EXECUTED when it has
finished the step, its sampling included; `sample_us` is 0 there.

REQUEST_GRAMMAR and REQUEST_ADAPTER are written when a request leaves a gate before intake, if it waited there.
SET_ASIDE is written when a sequence begins to wait for the device slot of its adapter, and when the adapter is there.

WAITING_FOR is written when the reason changes. It says what the first request in the queue lacks: slots, blocks,
swapped (blocks, to return from the host tier), tokens (of the step), a turn, or "" when the queue is empty.

STEP_DRAFTED is written when a step with drafts is done. The tokens of STEP_GRANTED and of the rows below do not include
drafts. `num_accepted` drafts became tokens of answers.

There is no record per token. Rows of a step are recorded by changes only (`StepRows` writes them). ROW_EXTEND is a row
that computes prompt tokens [start, start + num_tokens) in this step alone. ROW_DECODE is a row that from this step on
computes one token a step, the first at position `start`, until the next ROW record of its sequence. With `num_lanes`
above 1 it does so in every step that is a multiple of them later. A void step does not count. `token_times` derives the
token timeline. Memory records name slots; the rows say which sequence has a slot.

KV_RANGE gives the state of the blocks [first_block, first_block + num_blocks) from `step` on: `in_use` by a slot, in
its table; or, in no table, `free`, `cached` or `quarantined`, with NO_SLOT. With `left`, a slot has given up all of its
`num_blocks` blocks, and first_block is 0. New blocks of steps that only continue are written some steps later, but
before any other event about blocks. KV_POOL is written after blocks have left tables or returned to one; in steady
decoding STEP_GRANTED has the number of free blocks.
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
ENGINE_STEPS = 1 << 24  # steps whose numbers are further apart are of different engine processes
NO_SLOT = MAX_U32  # in place of a slot: none

# The header: fixed part, then the table of names, then the records.
HEADER = struct.Struct("<8sIIQQQQQII64s")
HEADER_FIELDS = (
    *("magic", "version", "record_size", "capacity_events", "num_written", "num_begun"),
    *("base_monotonic_ns", "base_wall_ns", "num_names", "pid", "thread"),
)
NUM_WRITTEN_AT, NUM_BEGUN_AT, NUM_NAMES_AT = 24, 32, 56  # offsets of the fields that change
NAMES_AT = 4_096
MAX_NAMES, NAME_BYTES = 1_024, 64  # each name: its length in the first byte, then UTF-8, cut to 63 bytes
RECORDS_AT = NAMES_AT + MAX_NAMES * NAME_BYTES

RECORD = struct.Struct("<QHHIIIII")
RECORD_DTYPE = np.dtype(
    [("time_ns", "<u8"), ("kind", "<u2"), ("source", "<u2"), ("step", "<u4")] + [(name, "<u4") for name in "abcd"]
)
Records = npt.NDArray[np.void]  # of RECORD_DTYPE
WHOLE = np.dtype((np.void, RECORD_DTYPE.itemsize))  # a view as this copies 20 times as fast as field by field
Column = npt.NDArray[np.integer[Any]]


class EventKind(IntEnum):
    """The kind of a record; its fields are in `FIELDS`."""

    STAGE_BATCH = 1
    STAGE_RESTART = 2
    EDGE_DEPTH = 3
    STALL = 4
    STAGE_TIME = 5

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
    REQUEST_ADAPTER = 57
    SET_ASIDE = 58

    PREEMPTED = 64
    RESUMED = 65
    PARKED = 66
    KV_RANGE = 67
    KV_POOL = 68
    UNPARKED = 69

    LOOP_LAG = 80
    GC_PAUSE = 81


# What a, b, c and d are. NOTE: a test compares this with the table above; docstrings may be stripped (-OO).
FIELDS: dict[EventKind, tuple[str, ...]] = {
    EventKind.STAGE_BATCH: ("num_items", "wait_us", "service_us", "blocked_us"),
    EventKind.STAGE_RESTART: ("num_restarts", "error_name"),
    EventKind.EDGE_DEPTH: ("num_waiting", "high_water", "num_sent", "full_us"),
    EventKind.STALL: ("waited_us", "num_waiting"),
    EventKind.STAGE_TIME: ("busy_us", "blocked_us", "idle_us"),
    EventKind.STEP_PLANNED: ("num_rows", "num_tokens", "num_running", "num_waiting"),
    EventKind.STEP_GRANTED: ("num_rows", "num_tokens", "num_decode_rows", "num_free_blocks"),
    EventKind.STEP_EXECUTED: ("num_rows", "num_tokens", "forward_us"),
    EventKind.STEP_SAMPLED: ("num_rows", "sample_us", "grammar_us"),
    EventKind.STEP_DONE: ("num_rows", "num_finished", "step_us"),
    EventKind.STEP_VOID: ("num_rows", "reason_name"),
    EventKind.WAITING_FOR: ("num_waiting", "num_running", "reason_name"),
    EventKind.STEP_DRAFTED: ("num_rows", "num_drafts", "num_accepted", "num_running"),
    EventKind.ROW_EXTEND: ("sequence_id", "slot", "start", "num_tokens"),
    EventKind.ROW_DECODE: ("sequence_id", "slot", "start", "num_lanes"),
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
    EventKind.REQUEST_ADAPTER: ("sequence_id", "waited_us"),
    EventKind.SET_ASIDE: ("sequence_id", "is_aside"),
    EventKind.PREEMPTED: ("slot", "how_name", "num_blocks", "num_tokens"),
    EventKind.RESUMED: ("slot", "how_name", "num_blocks", "num_tokens"),
    EventKind.PARKED: ("slot", "num_blocks", "sequence_id"),
    EventKind.KV_RANGE: ("slot", "first_block", "num_blocks", "state_name"),
    EventKind.KV_POOL: ("num_free", "num_in_use", "num_cached", "num_quarantined"),
    EventKind.UNPARKED: ("slot", "num_blocks", "sequence_id"),
    EventKind.LOOP_LAG: ("lag_us",),
    EventKind.GC_PAUSE: ("pause_us", "generation", "num_collected"),
}
