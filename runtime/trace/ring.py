"""The ring of records of one writing thread, and a reader that never disturbs the writer."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .format import (
    HEADER,
    HEADER_FIELDS,
    MAGIC,
    MAX_U32,
    NAME_BYTES,
    NAMES_AT,
    NUM_NAMES_AT,
    NUM_WRITTEN_AT,
    RECORD,
    RECORD_DTYPE,
    RECORDS_AT,
    VERSION,
    WHOLE,
    Column,
    Records,
)

DEFAULT_CAPACITY_EVENTS = 65_536  # 2 MiB per thread; at 14 events per step of 7 ms, about 30 s

_pack = RECORD.pack_into


class Emit(Protocol):
    """Writes one record, in order of time.

    Never fails: a value that its field cannot hold is clipped.
    """

    def __call__(
        self, kind: int, source: int, step: int = 0, a: int = 0, b: int = 0, c: int = 0, d: int = 0
    ) -> None: ...


class TraceRing:
    """The last `capacity_events` records of one writing thread.

    A full ring overwrites its oldest record.

    It is in memory, or in the file `path`, which other processes may read, also after a crash. Or it is in `file`, an
    open descriptor of `ring_bytes`; there it continues after the records of the process that used the file before.
    NOTE: one thread writes. Readers need no lock: two counters in the header show which records were overwritten
    during a read. The writer may be writing the oldest record, so `capacity_events - 1` can be read.
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
        file: int | None = None,
    ) -> None:
        if capacity_events < 2:
            raise ValueError(f"capacity_events = {capacity_events}: a trace ring has room for at least 2")
        self.capacity_events = capacity_events
        size = ring_bytes(capacity_events)
        self.map = _new_map(size, path) if file is None else mmap.mmap(file, size)
        num_written = num_written_in(self.map)
        fixed = (MAGIC, VERSION, RECORD.size, capacity_events, num_written, num_written)
        wall_ns = time.time_ns() if wall_ns is None else wall_ns
        HEADER.pack_into(self.map, 0, *fixed, now_ns(), wall_ns, 0, os.getpid(), thread.encode()[:64])
        self._now_ns = now_ns
        self._num_written = [num_written]  # a copy of the header's, three times as fast to read
        self._counters = memoryview(self.map)[NUM_WRITTEN_AT : NUM_WRITTEN_AT + 16].cast("Q")
        self._records: Records = np.frombuffer(self.map, RECORD_DTYPE, capacity_events, RECORDS_AT)
        self.emit = self._make_emit()

    def _make_emit(self) -> Emit:
        """Makes `emit` as a closure.

        It is a third faster than a method, which would look up six attributes.
        """
        ring = memoryview(self.map)  # writing into the map itself takes a third longer
        capacity, now_ns, pack_into = self.capacity_events, self._now_ns, _pack
        counters, count = self._counters, self._num_written

        def emit(kind: int, source: int, step: int = 0, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> None:
            num_written = count[0]
            at = RECORDS_AT + num_written % capacity * 32
            try:
                pack_into(ring, at, now_ns(), kind, source, step, a, b, c, d)
            except struct.error:
                clipped = (min(max(int(value), 0), MAX_U32) for value in (step, a, b, c, d))
                pack_into(ring, at, now_ns(), kind, source, *clipped)
            count[0] = counters[0] = num_written + 1

        return emit

    def emit_many(self, kind: int, source: int, step: int | Column, a: Column, *columns: Column | int) -> None:
        """Writes a record for each row of the columns `step`, `a`, `b`, ...: arrays [n].

        All but `a` may be a single integer.
        """
        num_new, num_written = len(a), self._num_written[0]
        if num_new <= 32:  # below that the array operations cost more than they save
            lists = (
                column.tolist() if isinstance(column, np.ndarray) else [column] * num_new
                for column in (step, a, *columns)
            )
            for row in zip(*lists, strict=True):
                self.emit(kind, source, *row)
            return
        rows = np.zeros(num_new, RECORD_DTYPE)
        rows["time_ns"], rows["kind"], rows["source"], rows["step"] = self._now_ns(), kind, source, step
        for name, column in zip("abcd", (a, *columns), strict=False):
            rows[name] = np.clip(column, 0, MAX_U32)
        end = num_written + num_new
        self._counters[1] = end  # NOTE: set before the first of these records is touched
        kept = rows[-self.capacity_events :]
        self._records[np.arange(end - len(kept), end) % self.capacity_events] = kept
        self._num_written[0] = self._counters[0] = end

    def write_names(self, names: Iterable[str], first_id: int) -> None:
        """Adds names to the table in the header, from id `first_id` on."""
        num_names = first_id
        for name in names:
            at = NAMES_AT + num_names * NAME_BYTES
            text = name.encode()[: NAME_BYTES - 1]
            self.map[at : at + 1 + len(text)] = bytes([len(text)]) + text
            num_names += 1
        struct.pack_into("<I", self.map, NUM_NAMES_AT, num_names)


class RingReader:
    """Reads a ring without disturbing its writer.

    The ring is of this process, or in a file, also of a dead process.
    """

    def __init__(self, ring: TraceRing | Path | mmap.mmap) -> None:
        if isinstance(ring, Path):
            self._map = _read_map(ring)
        else:
            self._map = ring.map if isinstance(ring, TraceRing) else ring
        self.capacity_events = self.header()["capacity_events"]

    def header(self) -> dict[str, Any]:
        """The header's current fields, by the names in HEADER_FIELDS."""
        return dict(zip(HEADER_FIELDS, HEADER.unpack_from(self._map, 0), strict=True))

    def names(self) -> list[str]:
        """The table of names: `names()[source]`."""
        (num_names,) = struct.unpack_from("<I", self._map, NUM_NAMES_AT)
        cells = (NAMES_AT + i * NAME_BYTES for i in range(num_names))
        return [self._map[at + 1 : at + 1 + self._map[at]].decode(errors="ignore") for at in cells]

    def read_since(self, cursor: int = 0) -> tuple[Records, int, int]:
        """(Records written since `cursor`, the next cursor, number of lost records).

        The first cursor is 0. The records are a copy; lost ones were overwritten before they could be read.
        """
        num_written, _ = self._counters()
        first = max(cursor, num_written - self.capacity_events)
        ring = np.frombuffer(self._map, WHOLE, self.capacity_events, RECORDS_AT)
        begin, count = first % self.capacity_events, num_written - first
        records = np.concatenate([ring[begin : begin + count], ring[: max(0, begin + count - self.capacity_events)]])
        num_written_now, num_begun = self._counters()
        num_touched = max(num_begun, num_written_now + 1)  # the writer may be writing one more record
        num_torn = min(max(num_touched - self.capacity_events - first, 0), len(records))
        return records[num_torn:].view(RECORD_DTYPE), num_written, first - cursor + num_torn

    def _counters(self) -> tuple[int, int]:
        num_written, num_begun = struct.unpack_from("<QQ", self._map, NUM_WRITTEN_AT)
        return num_written, num_begun


def ring_bytes(capacity_events: int = DEFAULT_CAPACITY_EVENTS) -> int:
    """Size of a ring in bytes."""
    return RECORDS_AT + capacity_events * RECORD.size


def num_written_in(ring: mmap.mmap) -> int:
    """The number of records ever written to a ring; 0 if it was never used."""
    magic, _, _, _, num_written, *_ = HEADER.unpack_from(ring, 0)
    return int(num_written) if magic == MAGIC else 0


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
            raise ValueError(f"{path}: {size} bytes: too short for a trace ring, whose header has {RECORDS_AT}")
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    magic, version, record_size, capacity_events = HEADER.unpack_from(mapped, 0)[:4]
    if magic != MAGIC or version != VERSION or record_size != RECORD.size:
        raise ValueError(
            f"{path}: magic {magic!r}, version {version}, record size {record_size}: this reader needs"
            f" {MAGIC!r}, {VERSION}, {RECORD.size}"
        )
    if size != RECORDS_AT + capacity_events * RECORD.size or capacity_events < 1:
        raise ValueError(f"{path}: {size} bytes, {capacity_events} records by its header: the file is cut or changed")
    return mapped
