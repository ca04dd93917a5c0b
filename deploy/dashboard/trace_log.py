"""The last steps and incidents, read from the trace's rings while a viewer shows them.

Each refresh reads only new records, and after a long pause only the last ones. The cost depends on the number of steps
and row changes, not on tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...runtime.trace.format import ENGINE_STEPS, RECORD_DTYPE
from ...runtime.trace.tracer import (
    EventKind,
    Records,
    RingReader,
    Tracer,
    as_dicts,
    in_order_of_time,
    some_of,
    table_of,
)

MAX_BEHIND = 8_192  # records of a ring that one refresh reads; older ones are skipped
MAX_STEPS, MAX_INCIDENTS = 600, 200  # kept
MAX_FOLLOWED = 4_096  # sequences whose progress is tracked
WINDOW_NS = 6_000_000_000  # age of records kept for the bottleneck
MAX_OLDER = 4_096  # older records kept, of the kinds that describe a state that still holds
FEW = 16  # up to so many steps a loop is faster than np.isin
MIN_PAUSE_US = 50_000  # shorter pauses are no incidents

Ends = NDArray[np.int64]  # [n, END_COLUMNS]: step, end in ns, duration in us, whether it is void, columns of `_Open`
OPEN_COLUMNS, END_COLUMNS = 8, 12

OF_STEPS = (
    *(EventKind.STEP_PLANNED, EventKind.STEP_GRANTED, EventKind.STEP_DONE, EventKind.STEP_VOID, EventKind.PREEMPTED),
    *(EventKind.ROW_EXTEND, EventKind.ROW_DECODE, EventKind.ROW_LEAVE),
    *(EventKind.REQUEST_ACCEPTED, EventKind.REQUEST_FINISHED),
)
PLAIN = (EventKind.STEP_PLANNED, EventKind.STEP_GRANTED, EventKind.STEP_DONE)  # all records of an ordinary step
OLDER = (
    *(EventKind.WAITING_FOR, EventKind.PARKED, EventKind.UNPARKED),
    *(EventKind.REQUEST_ACCEPTED, EventKind.REQUEST_FINISHED),
)
PAUSES = (EventKind.LOOP_LAG, EventKind.GC_PAUSE)
INCIDENTS = (
    *(EventKind.STAGE_RESTART, EventKind.STALL, EventKind.STEP_VOID, EventKind.REQUEST_SHED, EventKind.PARKED),
    *(EventKind.PREEMPTED, *PAUSES),
)
IS_OF_STEPS, IS_PLAIN, IS_OLDER, IS_PAUSE, IS_INCIDENT = map(table_of, (OF_STEPS, PLAIN, OLDER, PAUSES, INCIDENTS))


class StepRow(NamedTuple):
    """One completed or void step."""

    step: int
    ended_us: int  # on the engine's clock
    duration_us: int
    gap_us: int  # idle time of the device between the previous step and this one
    num_rows: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_cached_tokens: int  # of new rows, from the prefix cache
    num_wasted_tokens: int  # computed in vain or again: all of a void step, else those of preempted rows
    num_preempted: int
    num_waiting: int
    num_free_blocks: int
    is_void: int


@dataclass(slots=True)
class _Open:
    """A step that is planned and not completed."""

    num_waiting: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    num_decode: int = 0
    num_free: int = 0
    num_cached: int = 0
    num_wasted: int = 0
    num_preempted: int = 0

    def columns(self) -> tuple[int, ...]:
        """The last eight columns of an ended step."""
        return (
            *(self.num_waiting, self.num_rows, self.num_tokens, self.num_decode),
            *(self.num_free, self.num_cached, self.num_wasted, self.num_preempted),
        )


@dataclass(slots=True)
class _Progress:
    """The computed tokens of a sequence, from its row records."""

    high: int = 0  # tokens computed, or found in the cache
    decodes_from: int = -1  # position at the start of decoding; -1: not decoding
    step: int = 0  # step at the start of decoding
    every: int = 1  # steps between two tokens


class StepFold:
    """Makes `StepRow`s from records, which must come in order of time."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._followed: dict[int, _Progress] = {}  # by sequence id: those whose begin is in the trace
        self._last_end_ns: int | None = None

    def take(self, records: Records) -> list[StepRow]:
        """The steps that ended in these records."""
        of_steps = some_of(records, IS_OF_STEPS[records["kind"]])
        is_plain = IS_PLAIN[of_steps["kind"]]
        known = {*self._open, *of_steps["step"][~is_plain].tolist()}
        if len(known) <= FEW:
            for step in known:
                is_plain &= of_steps["step"] != step
        else:
            is_plain &= ~np.isin(of_steps["step"], [*known])
        plain, others = some_of(of_steps, is_plain), some_of(of_steps, ~is_plain)
        ends = np.concatenate([self._take_plain(plain), self._take_singly(others)])
        if not len(ends):
            return []
        ends = ends[np.argsort(ends[:, 1], kind="stable")]
        numbers = ends[:, 0]  # of all engine processes; those of one are in order
        for step in [*self._open]:
            if np.any((numbers >= step) & (numbers < step + ENGINE_STEPS)):
                del self._open[step]
        return self._rows_of(ends)

    def _take_plain(self, records: Records) -> Ends:
        """The ends of steps that begin in these records and have PLAIN records only: 0.5 us each instead of 5."""
        if not len(records):
            return np.zeros((0, END_COLUMNS), np.int64)
        first, last = int(records["step"].min()), int(records["step"].max())
        if last - first >= ENGINE_STEPS:
            is_first = records["step"] < first + ENGINE_STEPS  # those of one engine process
            return np.concatenate([self._take_plain(some_of(records, some)) for some in (is_first, ~is_first)])
        planned, granted, done = (some_of(records, records["kind"] == kind) for kind in PLAIN)
        counts = np.zeros((last - first + 1, OPEN_COLUMNS), np.int64)  # by step: as in `_Open`
        counts[planned["step"].astype(np.intp) - first, 0] = planned["d"]
        for place, column in enumerate("abcd", 1):
            counts[granted["step"].astype(np.intp) - first, place] = granted[column]
        is_begun = np.zeros(len(counts), np.bool_)
        is_begun[records["step"].astype(np.intp) - first] = True
        is_begun[done["step"].astype(np.intp) - first] = False
        begun = is_begun.nonzero()[0]
        self._open.update(zip((begun + first).tolist(), (_Open(*row) for row in counts[begun].tolist()), strict=True))
        times = np.stack([done[column].astype(np.int64) for column in ("step", "time_ns", "c")], axis=1)
        well = np.zeros((len(done), 1), np.int64)
        return np.concatenate([times, well, counts[times[:, 0] - first]], axis=1)

    def _take_singly(self, of_steps: Records) -> Ends:
        ends: list[tuple[int, ...]] = []
        for time_ns, kind, _, step, a, b, c, d in of_steps.tolist():
            match kind:
                case EventKind.STEP_PLANNED:
                    self._open.setdefault(step, _Open()).num_waiting = d
                case EventKind.STEP_GRANTED:
                    opened = self._open.setdefault(step, _Open())
                    opened.num_rows, opened.num_tokens, opened.num_decode, opened.num_free = a, b, c, d
                case EventKind.STEP_DONE | EventKind.STEP_VOID:
                    is_void = kind == EventKind.STEP_VOID
                    opened = self._open.pop(step, _Open())
                    ends.append((step, time_ns, 0 if is_void else c, is_void, *opened.columns()))
                case EventKind.PREEMPTED:
                    self._open.setdefault(step, _Open()).num_preempted += 1
                case EventKind.REQUEST_ACCEPTED:
                    self._follow(range(a, a + b))
                case EventKind.REQUEST_FINISHED:
                    self._followed.pop(a, None)
                case _:
                    self._row(kind, step, a, c, d)
        return np.array(ends, np.int64).reshape(-1, END_COLUMNS)

    def _rows_of(self, ends: Ends) -> list[StepRow]:
        step, time_ns, took_us, is_void, waiting, rows, tokens, decode, free, cached, wasted, preempted = ends.T
        began_ns = time_ns - 1000 * took_us
        before_ns = np.concatenate([[began_ns[0] if self._last_end_ns is None else self._last_end_ns], time_ns[:-1]])
        self._last_end_ns = int(time_ns[-1])
        columns = StepRow(
            step=step,
            ended_us=time_ns // 1000,
            duration_us=took_us,
            gap_us=np.maximum(0, began_ns - before_ns) // 1000,
            num_rows=rows,
            num_prefill_tokens=tokens - decode,
            num_decode_tokens=decode,
            num_cached_tokens=cached,
            num_wasted_tokens=np.where(is_void, tokens, wasted),
            num_preempted=preempted,
            num_waiting=waiting,
            num_free_blocks=free,
            is_void=is_void,
        )
        return list(map(StepRow._make, np.stack(columns, axis=1).tolist()))

    def _follow(self, sequence_ids: Iterable[int]) -> None:
        self._followed.update((sequence_id, _Progress()) for sequence_id in sequence_ids)
        while len(self._followed) > MAX_FOLLOWED:
            del self._followed[next(iter(self._followed))]

    def _row(self, kind: int, step: int, sequence_id: int, start: int, num_tokens: int) -> None:
        """Notes that a row begins to decode, computes a part of its prompt, or leaves."""
        progress = self._followed.get(sequence_id)
        if progress is None:
            return
        if progress.decodes_from >= 0:
            num_steps = -(-(step - progress.step) // progress.every)
            if not 0 <= num_steps < ENGINE_STEPS:
                num_steps = 0  # it goes on in another engine process; how far it came in the first is not known
            progress.high = max(progress.high, progress.decodes_from + num_steps)
            progress.decodes_from = -1
        if kind == EventKind.ROW_LEAVE:
            return
        opened = self._open.setdefault(step, _Open())
        if progress.high == 0:
            opened.num_cached += start
        num_new = num_tokens if kind == EventKind.ROW_EXTEND else 1
        opened.num_wasted += max(0, min(progress.high, start + num_new) - start)
        progress.high = max(progress.high, start + num_new)
        if kind == EventKind.ROW_DECODE:
            progress.step, progress.decodes_from, progress.every = step, start, max(1, num_tokens)


class TraceLog:
    """The last steps and incidents of one tracer, numbered from 0; `refresh` reads new records."""

    def __init__(self, tracer: Tracer) -> None:
        self.steps: deque[StepRow] = deque(maxlen=MAX_STEPS)
        self.incidents: deque[dict[str, Any]] = deque(maxlen=MAX_INCIDENTS)
        self.num_steps = self.num_incidents = 0  # since the start
        self.num_tokens = 0  # computed in steps since the start
        self.num_skipped = 0  # records not read
        self._window: deque[Records] = deque()  # the last seconds, in order
        self._older: Records = np.empty(0, RECORD_DTYPE)  # records of kind OLDER before the window
        self._tracer = tracer
        self._readers: list[RingReader] = []
        self._cursors: list[int] = []
        self._fold = StepFold()

    def refresh(self) -> None:
        """Reads the new records of all rings."""
        known = len(self._readers)
        readers = self._tracer.readers()
        self._readers += readers[known:]
        self._cursors += [0] * (len(readers) - known)
        parts = [self._read(place) for place in range(len(self._readers))]
        records = in_order_of_time(parts) if len(parts) > 1 else parts[0] if parts else None
        if records is None or not len(records):
            return
        self._keep(records)
        rows = self._fold.take(records)
        self.steps.extend(rows)
        self.num_steps += len(rows)
        self.num_tokens += sum(row.num_prefill_tokens + row.num_decode_tokens for row in rows)
        self._note_incidents(records)

    def window(self) -> tuple[list[Records], list[str]]:
        """(records, names of their sources) of the last `WINDOW_NS`, with older records of kind OLDER. Read-only."""
        return [self._older, *self._window], self._readers[0].names() if self._readers else []

    def steps_since(self, number: int) -> tuple[list[StepRow], int]:
        """(kept rows after the first `number` ones, number of all rows so far)."""
        return _tail(self.steps, self.num_steps - number), self.num_steps

    def incidents_since(self, number: int) -> tuple[list[dict[str, Any]], int]:
        """As `steps_since`, for incidents."""
        return _tail(self.incidents, self.num_incidents - number), self.num_incidents

    def _read(self, place: int) -> Records:
        reader, cursor = self._readers[place], self._cursors[place]
        num_written = reader.header()["num_written"]
        first = max(cursor, num_written - MAX_BEHIND)
        records, self._cursors[place], num_lost = reader.read_since(first)
        if skipped := first - cursor + num_lost:
            self.num_skipped += skipped
            self._fold = StepFold()  # its state is invalid after a gap
        return records

    def _keep(self, records: Records) -> None:
        self._window.append(records)
        since_ns = int(records["time_ns"][-1]) - WINDOW_NS
        while int(self._window[0]["time_ns"][-1]) < since_ns:
            left = self._window.popleft()
            self._older = in_order_of_time([self._older, some_of(left, IS_OLDER[left["kind"]])])[-MAX_OLDER:]

    def _note_incidents(self, records: Records) -> None:
        is_one = IS_INCIDENT[records["kind"]]
        if not is_one.any():
            return
        is_one &= ~IS_PAUSE[records["kind"]] | (records["a"] >= MIN_PAUSE_US)
        found = list(as_dicts(some_of(records, is_one)[-MAX_INCIDENTS:], self._readers[0].names()))
        self.incidents.extend(found)
        self.num_incidents += len(found)


def _tail(items: deque[Any], count: int) -> list[Any]:
    kept = min(count, len(items))
    return [items[place] for place in range(len(items) - kept, len(items))] if kept else []
