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
    STEP_SAMPLED      num_rows       sample_us
    STEP_DONE         num_rows       num_finished     step_us
    STEP_VOID         num_rows       reason_name
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
    PREEMPTED         slot           how_name         num_blocks          num_tokens
    RESUMED           slot           how_name         num_blocks          num_tokens
    PARKED            slot           num_blocks
    KV_RANGE          slot           first_block      num_blocks          state_name
    KV_POOL           num_free       num_in_use       num_cached          num_quarantined
    LOOP_LAG          lag_us
    GC_PAUSE          pause_us       generation       num_collected

STAGE_BATCH is written when the batch ends: it began `service_us + blocked_us` before, and its oldest item had then
waited `wait_us`. There is no record per token. Who took part in a step is told by changes only (`StepRows` writes
them): ROW_EXTEND is a row that computes prompt tokens [start, start + num_tokens) in this step alone, ROW_DECODE one
that from this step on computes one token a step, the first at position `start`, until the next ROW_EXTEND or ROW_LEAVE
of its sequence; a void step counts for nothing. `token_times` derives the token timeline. Memory records name slots,
and the rows say whose slot it is.

Cost, on a 2-core machine with both cores busy, where an empty call of as many arguments takes 0.11 us:
`TraceRing.emit` 0.9 us, `Tracer.emit` 1.2 us, switched off 0.3 us; `emit_many` of 256 rows 0.4 us a row;
`StepRows.step` 10 us for 256 rows that go on decoding.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .env import Env

MAGIC = b"MRTRACE\0"
VERSION = 1
MAX_U32 = 2**32 - 1

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
_pack = RECORD.pack_into
RECORD_DTYPE = np.dtype(
    [("time_ns", "<u8"), ("kind", "<u2"), ("source", "<u2"), ("step", "<u4")] + [(name, "<u4") for name in "abcd"]
)
Records = npt.NDArray[np.void]  # of RECORD_DTYPE
Column = npt.NDArray[np.integer[Any]]
DEFAULT_CAPACITY_EVENTS = 65_536  # 2 MiB a thread; at 10 events a step of 7 ms, about 45 s


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

    PREEMPTED = 64
    RESUMED = 65
    PARKED = 66
    KV_RANGE = 67
    KV_POOL = 68

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
    EventKind.STEP_SAMPLED: ("num_rows", "sample_us"),
    EventKind.STEP_DONE: ("num_rows", "num_finished", "step_us"),
    EventKind.STEP_VOID: ("num_rows", "reason_name"),
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
    EventKind.PREEMPTED: ("slot", "how_name", "num_blocks", "num_tokens"),
    EventKind.RESUMED: ("slot", "how_name", "num_blocks", "num_tokens"),
    EventKind.PARKED: ("slot", "num_blocks"),
    EventKind.KV_RANGE: ("slot", "first_block", "num_blocks", "state_name"),
    EventKind.KV_POOL: ("num_free", "num_in_use", "num_cached", "num_quarantined"),
    EventKind.LOOP_LAG: ("lag_us",),
    EventKind.GC_PAUSE: ("pause_us", "generation", "num_collected"),
}


class Emit(Protocol):
    """Writes one record, in order of time. Never fails: a value that its field cannot hold is clipped."""

    def __call__(
        self, kind: int, source: int, step: int = 0, a: int = 0, b: int = 0, c: int = 0, d: int = 0
    ) -> None: ...


class TraceRing:
    """The last `capacity_events` records of one writing thread. A full ring overwrites its oldest record.

    In memory, or in the file `path`, which other processes may read meanwhile and anybody after a crash.
    NOTE: one thread writes. Readers need no lock: they see by two counters in the header what was overwritten under
    them. The oldest record may be under the writer's hand, so `capacity_events - 1` can be read.
    """

    emit: Emit

    def __init__(
        self,
        capacity_events: int = DEFAULT_CAPACITY_EVENTS,
        path: Path | None = None,
        *,
        now_ns: Callable[[], int] = time.monotonic_ns,
        wall_ns: int | None = None,
        thread: str = "",
    ) -> None:
        if capacity_events < 2:
            raise ValueError(f"capacity_events = {capacity_events}: a trace ring has room for at least 2")
        self.capacity_events = capacity_events
        self.map = _new_map(RECORDS_AT + capacity_events * RECORD.size, path)
        fixed = (MAGIC, VERSION, RECORD.size, capacity_events, 0, 0)
        wall_ns = time.time_ns() if wall_ns is None else wall_ns
        HEADER.pack_into(self.map, 0, *fixed, now_ns(), wall_ns, 0, os.getpid(), thread.encode()[:64])
        self._now_ns = now_ns
        self._counters = memoryview(self.map)[NUM_WRITTEN_AT : NUM_WRITTEN_AT + 16].cast("Q")
        self._records: Records = np.frombuffer(self.map, RECORD_DTYPE, capacity_events, RECORDS_AT)
        self.emit = self._make_emit()

    def _make_emit(self) -> Emit:
        """As a closure, for speed: a third less than a method that looks up its six attributes."""
        ring, capacity, counters, now_ns, pack_into = (
            self.map,
            self.capacity_events,
            self._counters,
            self._now_ns,
            _pack,
        )

        def emit(kind: int, source: int, step: int = 0, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> None:
            num_written = counters[0]
            at = RECORDS_AT + num_written % capacity * 32
            try:
                pack_into(ring, at, now_ns(), kind, source, step, a, b, c, d)
            except struct.error:
                clipped = (min(max(int(value), 0), MAX_U32) for value in (step, a, b, c, d))
                pack_into(ring, at, now_ns(), kind, source, *clipped)
            counters[0] = num_written + 1

        return emit

    def emit_many(self, kind: int, source: int, step: int, a: Column, *columns: Column | int) -> None:
        """Writes a record for each row of the columns `a`, `b`, ...: arrays [n]; all but `a` may be one integer."""
        num_new, num_written = len(a), self._counters[0]
        if num_new <= 32:  # below that the array operations cost more than they save
            lists = (
                column.tolist() if isinstance(column, np.ndarray) else [column] * num_new for column in (a, *columns)
            )
            for row in zip(*lists, strict=True):
                self.emit(kind, source, step, *row)
            return
        rows = np.zeros(num_new, RECORD_DTYPE)
        rows["time_ns"], rows["kind"], rows["source"], rows["step"] = self._now_ns(), kind, source, step
        for name, column in zip("abcd", (a, *columns), strict=False):
            rows[name] = np.clip(column, 0, MAX_U32)
        end = num_written + num_new
        self._counters[1] = end  # NOTE: before the first of them is touched
        kept = rows[-self.capacity_events :]
        self._records[np.arange(end - len(kept), end) % self.capacity_events] = kept
        self._counters[0] = end

    def write_names(self, names: Iterable[str], first_id: int) -> None:
        """Puts names into the table of the header, from `first_id` on."""
        num_names = first_id
        for name in names:
            at = NAMES_AT + num_names * NAME_BYTES
            text = name.encode()[: NAME_BYTES - 1]
            self.map[at : at + 1 + len(text)] = bytes([len(text)]) + text
            num_names += 1
        struct.pack_into("<I", self.map, NUM_NAMES_AT, num_names)


class Reader:
    """Reads a ring without disturbing its writer: one of this process, or a file (also of a process that has died)."""

    def __init__(self, ring: TraceRing | Path) -> None:
        self._map = ring.map if isinstance(ring, TraceRing) else _read_map(ring)
        self.capacity_events = self.header()["capacity_events"]

    def header(self) -> dict[str, Any]:
        """The fields of the header now, by the names in HEADER_FIELDS."""
        return dict(zip(HEADER_FIELDS, HEADER.unpack_from(self._map, 0), strict=True))

    def names(self) -> list[str]:
        """The table of names: `names()[source]`."""
        (num_names,) = struct.unpack_from("<I", self._map, NUM_NAMES_AT)
        cells = (NAMES_AT + i * NAME_BYTES for i in range(num_names))
        return [self._map[at + 1 : at + 1 + self._map[at]].decode(errors="ignore") for at in cells]

    def read_since(self, cursor: int = 0) -> tuple[Records, int, int]:
        """The records written since `cursor` (0 at first): a copy, the cursor for the next call, and how many of them
        were overwritten before they could be read."""
        num_written, _ = self._counters()
        first = max(cursor, num_written - self.capacity_events)
        places = np.arange(first, num_written) % self.capacity_events
        records = np.frombuffer(self._map, RECORD_DTYPE, self.capacity_events, RECORDS_AT)[places]
        num_written_now, num_begun = self._counters()
        num_touched = max(num_begun, num_written_now + 1)  # the writer may be at work on the one after the last written
        num_torn = min(max(num_touched - self.capacity_events - first, 0), len(records))
        return records[num_torn:], num_written, first - cursor + num_torn

    def _counters(self) -> tuple[int, int]:
        num_written, num_begun = struct.unpack_from("<QQ", self._map, NUM_WRITTEN_AT)
        return num_written, num_begun


class Tracer:
    """Hands each writing thread its ring. One per pipeline.

    `enabled` may be switched at any time; switched off, `emit` returns at once. `strict` (for tests) makes `emit` raise
    where a record would not say what `FIELDS` promises.
    """

    def __init__(
        self,
        env: Env | None = None,
        *,
        enabled: bool = True,
        capacity_events: int = DEFAULT_CAPACITY_EVENTS,
        directory: Path | None = None,
        strict: bool = False,
    ) -> None:
        self.enabled = enabled
        self._is_strict = strict
        self._now_ns = time.monotonic_ns if env is None else env.now_ns
        self._wall_time = time.time if env is None else env.wall_time
        self._capacity_events = capacity_events
        self._directory = directory
        self._rings: list[TraceRing] = []
        self._here = _Here()
        self._names: dict[str, int] = {"": 0}
        self._lock = threading.Lock()

    def source(self, name: str) -> int:
        """The id of a name (of a stage, an edge, a cause), always the same; ask once and keep it."""
        with self._lock:
            if name not in self._names:
                if len(self._names) >= MAX_NAMES:
                    return 0  # a table that is full is no reason to stop serving
                self._names[name] = len(self._names)
                for ring in self._rings:
                    ring.write_names([name], self._names[name])
            return self._names[name]

    def emit(self, kind: int, source: int, step: int = 0, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> None:
        """Writes a record into this thread's ring."""
        if self.enabled:
            (self._here.emit or self._new_ring().emit)(kind, source, step, a, b, c, d)

    def emit_many(self, kind: int, source: int, step: int, a: Column, *columns: Column | int) -> None:
        """Writes a record for each row of the columns, as `TraceRing.emit_many`."""
        if self.enabled:
            (self._here.ring or self._new_ring()).emit_many(kind, source, step, a, *columns)

    def emit_request_name(self, source: int, sequence_id: int, request_id: str) -> None:
        """Ties a sequence to its request's name, 12 bytes of UTF-8 a record."""
        if self.enabled:
            text = request_id.encode()
            for start in range(0, len(text), 12):
                words = struct.unpack("<III", text[start : start + 12].ljust(12, b"\0"))
                self.emit(EventKind.REQUEST_NAME, source, 0, sequence_id, *words)

    def readers(self) -> list[Reader]:
        """A reader of each ring there is."""
        return [Reader(ring) for ring in list(self._rings)]

    def read_all(self) -> Records:
        """What the rings hold now, in order of time."""
        return in_order_of_time(reader.read_since()[0] for reader in self.readers())

    def _checked(self, emit: Emit) -> Emit:
        def check(kind: int, source: int, step: int = 0, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> None:
            _check(kind, source, len(self._names), (step, a, b, c, d))
            emit(kind, source, step, a, b, c, d)

        return check

    def _new_ring(self) -> TraceRing:
        thread = threading.current_thread()
        with self._lock:
            path = self._directory and self._directory / f"{len(self._rings):03d}-{thread.name.replace('/', '_')}.trace"
            ring = TraceRing(
                self._capacity_events,
                path,
                now_ns=self._now_ns,
                wall_ns=round(self._wall_time() * 1e9),
                thread=thread.name,
            )
            ring.write_names(self._names, first_id=0)
            if self._is_strict:
                ring.emit = self._checked(ring.emit)
            self._rings.append(ring)
        self._here.ring = ring
        self._here.emit = ring.emit
        return ring


class _Here(threading.local):
    """This thread's ring, and its `emit`."""

    ring: TraceRing | None = None
    emit: Emit | None = None


KEYFRAME_STEPS = 256


class StepRows:
    """Writes who takes part in each step, as changes: nothing while the same rows go on decoding. Every KEYFRAME_STEPS
    steps all rows are written, so that what is left of an overwritten ring can still be read.

    `num_slots` is the size of the slot-indexed state.
    """

    def __init__(self, tracer: Tracer, source: int, num_slots: int) -> None:
        self._tracer = tracer
        self._source = source
        self._decoding = np.full(num_slots, -1, np.int64)  # [S] the sequence that decodes there, -1 if none
        self._last_slots = np.empty(0, np.int64)
        self._decoding_slots: Column | None = None  # of the last step, if all its rows decoded

    def go_on(self, step: int, slots: Column) -> bool:
        """Whether this step has the last one's rows, all decoding: the very same array says so, and there is nothing
        to write."""
        return slots is self._decoding_slots and step % KEYFRAME_STEPS != 0

    def step(
        self,
        step: int,
        slots: Column,
        sequence_ids: Column,
        starts: Column,
        num_tokens: Column,
    ) -> None:
        """The rows of a step, [R] each: slot, sequence, position of its first token, tokens computed."""
        if not self._tracer.enabled:
            return
        decodes, before = num_tokens == 1, self._decoding[slots]
        is_new = before != sequence_ids
        if step % KEYFRAME_STEPS == 0:
            is_new[:] = True
        self._decoding_slots = slots if decodes.all() else None
        if not is_new.any() and len(slots) == len(self._last_slots) and self._decoding_slots is not None:
            return  # as many rows, all of which decoded before: the same ones
        emit_many, source = self._tracer.emit_many, self._source
        extends, begins = ~decodes, decodes & is_new
        left = np.concatenate([np.setdiff1d(self._last_slots, slots), slots[before != sequence_ids]])  # or taken over
        left = left[self._decoding[left] >= 0]
        if len(left):
            emit_many(EventKind.ROW_LEAVE, source, step, self._decoding[left], left)
            self._decoding[left] = -1
        if extends.any():
            of_slots = (slots[extends], starts[extends], num_tokens[extends])
            emit_many(EventKind.ROW_EXTEND, source, step, sequence_ids[extends], *of_slots)
        if begins.any():
            emit_many(EventKind.ROW_DECODE, source, step, sequence_ids[begins], slots[begins], starts[begins])
        self._decoding[slots] = np.where(decodes, sequence_ids, -1)
        self._last_slots = slots.astype(np.int64)


def in_order_of_time(parts: Iterable[Records]) -> Records:
    """Joins the records of several rings; those of one ring keep their order."""
    records = np.concatenate([np.empty(0, RECORD_DTYPE), *parts])
    return records[np.argsort(records["time_ns"], kind="stable")]


def as_dicts(records: Records, names: list[str]) -> Iterator[dict[str, Any]]:
    """Each record with its fields under their names, ids of names resolved. For people and exports, not for speed."""
    for record in records:
        kind = EventKind(int(record["kind"]))
        event: dict[str, Any] = {"time_ns": int(record["time_ns"]), "kind": kind.name}
        event |= {"source": names[record["source"]], "step": int(record["step"])}
        for field, column in zip(FIELDS[kind], "abcd", strict=False):
            value = int(record[column])
            event[field] = names[value] if field.endswith("_name") else value
        yield event


def request_names(records: Records) -> dict[int, str]:
    """sequence_id -> request_id, from the REQUEST_NAME records, which must be in order."""
    texts: dict[int, bytes] = {}
    for record in records[records["kind"] == EventKind.REQUEST_NAME]:
        words = struct.pack("<III", *(int(record[column]) for column in "bcd"))
        texts[int(record["a"])] = texts.get(int(record["a"]), b"") + words
    return {sequence_id: text.rstrip(b"\0").decode(errors="replace") for sequence_id, text in texts.items()}


def token_times(records: Records) -> dict[int, list[tuple[int, int]]]:
    """sequence_id -> (step, time_ns) of each token it was given: the token timeline.

    `records` are in order of time and reach back to where the rows joined. The time is that of the step's STEP_DONE. A
    row that extends gets a token if the next thing told of it is that it decodes: its prompt was then complete.
    """
    done = {int(r["step"]): int(r["time_ns"]) for r in records[records["kind"] == EventKind.STEP_DONE]}
    rows = records[np.isin(records["kind"], (EventKind.ROW_EXTEND, EventKind.ROW_DECODE, EventKind.ROW_LEAVE))]
    last_step = max(done, default=0)
    history: dict[int, list[tuple[int, int]]] = {}  # sequence_id -> (step, kind), in order
    for row in rows:
        history.setdefault(int(row["a"]), []).append((int(row["step"]), int(row["kind"])))
    timeline: dict[int, list[tuple[int, int]]] = {}
    for sequence_id, events in history.items():
        steps: list[int] = []
        for (step, kind), (next_step, next_kind) in zip(events, [*events[1:], (last_step + 1, 0)], strict=True):
            if kind == EventKind.ROW_DECODE:
                steps.extend(range(step, next_step))
            elif kind == EventKind.ROW_EXTEND and next_kind == EventKind.ROW_DECODE:
                steps.append(step)
        timeline[sequence_id] = [(step, done[step]) for step in steps if step in done]
    return timeline


def _check(kind: int, source: int, num_names: int, values: tuple[int, ...]) -> None:
    fields = FIELDS[EventKind(kind)]
    if any(values[1 + len(fields) :]):
        raise ValueError(f"{EventKind(kind).name} has the fields {', '.join(fields)}, and got {values[1:]}")
    if not 0 <= source < num_names:
        raise ValueError(f"{EventKind(kind).name}: source {source} is not the id of a name; get one from Tracer.source")
    for name, value in zip(("step", *fields), values, strict=False):
        if not 0 <= value <= MAX_U32:
            raise ValueError(f"{EventKind(kind).name}: {name} = {value} does not fit in 32 bits")
        if name.endswith("_name") and value >= num_names:
            raise ValueError(f"{EventKind(kind).name}: {name} = {value} is not the id of a name; use Tracer.source")


def _new_map(num_bytes: int, path: Path | None) -> mmap.mmap:
    if path is None:
        return mmap.mmap(-1, num_bytes)
    with path.open("w+b") as file:
        file.truncate(num_bytes)
        return mmap.mmap(file.fileno(), num_bytes)


def _read_map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < RECORDS_AT:
            raise ValueError(f"{path}: {size} bytes is no trace ring, whose header alone has {RECORDS_AT}")
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    magic, version, record_size, capacity_events = HEADER.unpack_from(mapped, 0)[:4]
    if magic != MAGIC or version != VERSION or record_size != RECORD.size:
        raise ValueError(
            f"{path}: magic {magic!r}, version {version}, record size {record_size}: this reader knows"
            f" {MAGIC!r}, {VERSION}, {RECORD.size}"
        )
    if size != RECORDS_AT + capacity_events * RECORD.size or capacity_events < 1:
        raise ValueError(f"{path}: {size} bytes, {capacity_events} records by its header: the file is cut or changed")
    return mapped
