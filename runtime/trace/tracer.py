"""The tracer: gives each writing thread a ring of records, and reads them all. Always on.

Import from here. The format is in `format.py`, the ring in `ring.py`, the rows of steps in `step_rows.py`, and
functions on records in `tables.py`.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..env.env import Env
from .format import FIELDS, MAX_NAMES, MAX_U32, NO_SLOT, Column, EventKind, Records
from .ring import DEFAULT_CAPACITY_EVENTS, Emit, Reader, TraceRing, num_written_in, ring_bytes
from .tables import as_dicts, in_order_of_time, request_names, some_of, table_of, token_times

NAME_COLUMNS = [
    (kind, column)
    for kind, fields in FIELDS.items()
    for field, column in zip(fields, "abcd", strict=False)
    if field.endswith("_name")
]


class Tracer:
    """Gives each writing thread its ring. One per pipeline.

    `enabled` may be switched at any time; switched off, `emit` returns at once. `strict` (for tests) makes `emit` raise
    if a record does not fit `FIELDS`. Rings are in memory, or in `directory`, or in `files`: open descriptors of
    `ring_bytes`, one for each writing thread in turn, so that another process can `adopt` them.
    """

    def __init__(
        self,
        env: Env | None = None,
        *,
        enabled: bool = True,
        capacity_events: int = DEFAULT_CAPACITY_EVENTS,
        directory: Path | None = None,
        strict: bool = False,
        files: Sequence[int] = (),
    ) -> None:
        self.enabled = enabled
        self._is_strict = strict
        self._now_ns = time.monotonic_ns if env is None else env.now_ns
        self._wall_time = time.time if env is None else env.wall_time
        self._capacity_events = capacity_events
        self._directory = directory
        self._files = list(files)
        self._rings: list[TraceRing] = []
        self._readable: list[TraceRing | mmap.mmap] = []  # own and adopted rings, in the order of their first use
        self._adopted: list[mmap.mmap] = []  # of other processes, not used yet
        self._here = _Here()
        self._names: dict[str, int] = {name: place for place, name in enumerate(_names_before(files))} or {"": 0}
        self._lock = threading.Lock()

    def source(self, name: str) -> int:
        """The id of a name (of a stage, an edge, a cause). It never changes, so callers may keep it."""
        with self._lock:
            if name not in self._names:
                if len(self._names) >= MAX_NAMES:
                    return 0  # a full table must not stop serving
                self._names[name] = len(self._names)
                for ring in self._rings:
                    ring.write_names([name], self._names[name])
            return self._names[name]

    @property
    def has_ring(self) -> bool:
        """Whether this thread has a ring.

        If so, `emit` takes no lock, so it is safe while a tracer's lock is held.
        """
        return self._here.ring is not None

    def names(self) -> list[str]:
        """All names so far: `names()[source]`."""
        return list(self._names)

    def emit(self, kind: int, source: int, step: int = 0, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> None:
        """Writes a record into this thread's ring."""
        if self.enabled:
            (self._here.emit or self._new_ring().emit)(kind, source, step, a, b, c, d)

    def bind(self) -> Emit:
        """This thread's `emit`, a third cheaper.

        For a caller that stays on one thread and checks `enabled` itself.
        """
        return self._here.emit or self._new_ring().emit

    def emit_many(self, kind: int, source: int, step: int | Column, a: Column, *columns: Column | int) -> None:
        """Writes a record for each row of the columns, as `TraceRing.emit_many`."""
        if self.enabled:
            (self._here.ring or self._new_ring()).emit_many(kind, source, step, a, *columns)

    def emit_request_name(self, source: int, sequence_id: int, request_id: str) -> None:
        """Records the request id of a sequence, 12 bytes of UTF-8 per record."""
        if self.enabled:
            text = request_id.encode()
            for start in range(0, len(text), 12):
                words = struct.unpack("<III", text[start : start + 12].ljust(12, b"\0"))
                self.emit(EventKind.REQUEST_NAME, source, 0, sequence_id, *words)

    def adopt(self, ring: mmap.mmap) -> None:
        """Adds a ring that another process writes.

        Its records are read with its names mapped to ours.
        """
        with self._lock:
            self._adopted.append(ring)

    def readers(self) -> list[Reader]:
        """A reader for each ring, always in the same order; new ones come last."""
        with self._lock:
            begun = [ring for ring in self._adopted if num_written_in(ring)]
            self._readable += begun
            self._adopted = [ring for ring in self._adopted if ring not in begun]
            readable = list(self._readable)
        return [Reader(ring) if isinstance(ring, TraceRing) else AdoptedReader(ring, self) for ring in readable]

    def read_all(self) -> Records:
        """All records that the rings hold now, in order of time."""
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
                file=self._files.pop(0) if self._files else None,
            )
            ring.write_names(self._names, first_id=0)
            if self._is_strict:
                ring.emit = self._checked(ring.emit)
            self._rings.append(ring)
            self._readable.append(ring)
        self._here.ring = ring
        self._here.emit = ring.emit
        return ring


class AdoptedReader(Reader):
    """Reads a ring of another process, and maps its name ids to those of `tracer`."""

    def __init__(self, ring: mmap.mmap, tracer: Tracer) -> None:
        super().__init__(ring)
        self._tracer = tracer

    def names(self) -> list[str]:
        """The tracer's names."""
        return self._tracer.names()

    def read_since(self, cursor: int = 0) -> tuple[Records, int, int]:
        """As `Reader.read_since`, with the tracer's name ids."""
        records, cursor, num_lost = super().read_since(cursor)
        ids = np.array([self._tracer.source(name) for name in super().names()], np.uint32)
        records["source"] = ids.take(records["source"], mode="clip")
        for kind, column in NAME_COLUMNS:
            is_one = records["kind"] == kind
            if np.count_nonzero(is_one):
                records[column][is_one] = ids.take(records[column][is_one], mode="clip")
        return records, cursor, num_lost


def _names_before(files: Sequence[int]) -> list[str]:
    """The names of the process that wrote these files before.

    So ids in its records keep their meaning.
    """
    rings = (mmap.mmap(file, 0, access=mmap.ACCESS_READ) for file in files)
    return max((Reader(ring).names() for ring in rings if num_written_in(ring)), key=len, default=[])


class _Here(threading.local):
    """This thread's ring and its `emit`."""

    ring: TraceRing | None = None
    emit: Emit | None = None


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


__all__ = [
    "FIELDS",
    "NO_SLOT",
    "Emit",
    "EventKind",
    "Reader",
    "Records",
    "TraceRing",
    "Tracer",
    "as_dicts",
    "in_order_of_time",
    "request_names",
    "ring_bytes",
    "some_of",
    "table_of",
    "token_times",
]
