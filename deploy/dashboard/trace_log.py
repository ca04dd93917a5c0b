"""What the trace says of the last steps, and what went wrong lately: read from its rings while somebody looks.

Only what is new since the last look is read, and of a long time in which nobody looked only the end. Costs as much as
steps and changes of rows, never as tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from ...runtime.trace import EventKind, Reader, Records, Tracer, as_dicts, in_order_of_time
from ...runtime.trace_format import RECORD_DTYPE

MAX_BEHIND = 8_192  # records of a ring that are read at once; older ones are skipped
MAX_STEPS, MAX_INCIDENTS = 600, 200  # kept
MAX_FOLLOWED = 4_096  # sequences whose progress is known
WINDOW_NS = 6_000_000_000  # of records that are kept for whoever thinks about them
MAX_OLDER = 4_096  # records kept for longer, of the kinds that say how things have been since
MIN_PAUSE_US = 50_000  # shorter ones are daily life

OF_STEPS = (
    *(EventKind.STEP_PLANNED, EventKind.STEP_GRANTED, EventKind.STEP_DONE, EventKind.STEP_VOID, EventKind.PREEMPTED),
    *(EventKind.ROW_EXTEND, EventKind.ROW_DECODE, EventKind.ROW_LEAVE),
    *(EventKind.REQUEST_ACCEPTED, EventKind.REQUEST_FINISHED),
)
PLAIN = (EventKind.STEP_PLANNED, EventKind.STEP_GRANTED, EventKind.STEP_DONE)  # all there is of steps that go well
OLDER = (
    *(EventKind.WAITING_FOR, EventKind.PARKED, EventKind.UNPARKED),
    *(EventKind.REQUEST_ACCEPTED, EventKind.REQUEST_FINISHED),
)
PAUSES = (EventKind.LOOP_LAG, EventKind.GC_PAUSE)
INCIDENTS = (
    *(EventKind.STAGE_RESTART, EventKind.STALL, EventKind.STEP_VOID, EventKind.REQUEST_SHED, EventKind.PARKED),
    *(EventKind.PREEMPTED, *PAUSES),
)


class StepRow(NamedTuple):
    """One step that is over."""

    step: int
    ended_us: int  # on the engine's clock
    duration_us: int
    gap_us: int  # between the end of the one before and its begin: the device had nothing to do
    num_rows: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_cached_tokens: int  # that its new rows did not need to compute
    num_wasted_tokens: int  # computed for nothing, or once more: of a void step all, else those of preempted rows
    num_preempted: int
    num_waiting: int
    num_free_blocks: int
    is_void: int


@dataclass(slots=True)
class _Open:
    """A step that was planned and is not over."""

    num_waiting: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    num_decode: int = 0
    num_free: int = 0
    num_cached: int = 0
    num_wasted: int = 0
    num_preempted: int = 0


class _End(NamedTuple):
    """A step that is over."""

    step: int
    time_ns: int
    duration_us: int
    opened: _Open
    is_void: bool = False


@dataclass(slots=True)
class _Progress:
    """How far a sequence has been computed, as far as rows have told."""

    high: int = 0  # tokens that were computed, or found
    decodes_from: int = -1  # the position at which it began to decode; -1: it does not
    step: int = 0  # in which it did


class StepFold:
    """Makes rows of steps from records, which come in order of time."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._followed: dict[int, _Progress] = {}  # by sequence id: those whose beginning was seen
        self._last_end_ns: int | None = None

    def take(self, records: Records) -> list[StepRow]:
        """The steps that ended in these records."""
        of_steps = records[np.isin(records["kind"], OF_STEPS)]
        is_plain = np.isin(of_steps["kind"], PLAIN)
        known = [*self._open, *np.unique(of_steps["step"][~is_plain]).tolist()]
        is_plain &= ~np.isin(of_steps["step"], known)
        ends = self._take_plain(of_steps[is_plain]) + self._take_singly(of_steps[~is_plain])
        ends.sort(key=attrgetter("time_ns"))
        if ends:
            self._open = {step: opened for step, opened in self._open.items() if step > ends[-1].step}
        return list(map(self._row_of, ends))

    def _take_plain(self, records: Records) -> list[_End]:
        """Of steps that begin in these records and have PLAIN ones only: half a microsecond each instead of five."""
        if not len(records):
            return []
        first = int(records["step"].min())
        counts = np.zeros((int(records["step"].max()) - first + 1, 5), np.int64)  # by step: as in `_Open`
        planned, granted, done = (records[records["kind"] == kind] for kind in PLAIN)
        counts[planned["step"].astype(np.intp) - first, 0] = planned["d"]
        for place, column in enumerate("abcd", 1):
            counts[granted["step"].astype(np.intp) - first, place] = granted[column]
        opened = [_Open(*row) for row in counts.tolist()]
        is_begun = np.zeros(len(counts), np.bool_)
        is_begun[records["step"].astype(np.intp) - first] = True
        is_begun[done["step"].astype(np.intp) - first] = False
        self._open.update((first + place, opened[place]) for place in is_begun.nonzero()[0].tolist())
        told = zip(*(done[column].tolist() for column in ("step", "time_ns", "c")), strict=True)
        return [_End(step, time_ns, took_us, opened[step - first]) for step, time_ns, took_us in told]

    def _take_singly(self, of_steps: Records) -> list[_End]:
        ends: list[_End] = []
        for time_ns, kind, _, step, a, b, c, d in of_steps.tolist():
            match kind:
                case EventKind.STEP_PLANNED:
                    self._open.setdefault(step, _Open()).num_waiting = d
                case EventKind.STEP_GRANTED:
                    opened = self._open.setdefault(step, _Open())
                    opened.num_rows, opened.num_tokens, opened.num_decode, opened.num_free = a, b, c, d
                case EventKind.STEP_DONE | EventKind.STEP_VOID:
                    is_void = kind == EventKind.STEP_VOID
                    begun = self._open.pop(step, None)
                    ends.append(_End(step, time_ns, 0 if is_void else c, begun or _Open(), is_void))
                case EventKind.PREEMPTED:
                    self._open.setdefault(step, _Open()).num_preempted += 1
                case EventKind.REQUEST_ACCEPTED:
                    self._follow(range(a, a + b))
                case EventKind.REQUEST_FINISHED:
                    self._followed.pop(a, None)
                case _:
                    self._row(kind, step, a, c, d)
        return ends

    def _row_of(self, end: _End) -> StepRow:
        step, time_ns, duration_us, opened, is_void = end
        began_ns = time_ns - 1000 * duration_us
        gap_us = 0 if self._last_end_ns is None else max(0, (began_ns - self._last_end_ns) // 1000)
        self._last_end_ns = time_ns
        return StepRow(
            step,
            time_ns // 1000,
            duration_us,
            gap_us,
            opened.num_rows,
            opened.num_tokens - opened.num_decode,
            opened.num_decode,
            opened.num_cached,
            opened.num_tokens if is_void else opened.num_wasted,
            opened.num_preempted,
            opened.num_waiting,
            opened.num_free,
            int(is_void),
        )

    def _follow(self, sequence_ids: Iterable[int]) -> None:
        self._followed.update((sequence_id, _Progress()) for sequence_id in sequence_ids)
        while len(self._followed) > MAX_FOLLOWED:
            del self._followed[next(iter(self._followed))]

    def _row(self, kind: int, step: int, sequence_id: int, start: int, num_tokens: int) -> None:
        """A row begins to decode, computes a part of its prompt, or leaves."""
        progress = self._followed.get(sequence_id)
        if progress is None:
            return
        if progress.decodes_from >= 0:
            progress.high = max(progress.high, progress.decodes_from + step - progress.step)
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
            progress.step, progress.decodes_from = step, start


class TraceLog:
    """The last steps and incidents of one tracer, each with a number that only grows; `refresh` reads what is new."""

    def __init__(self, tracer: Tracer) -> None:
        self.steps: deque[StepRow] = deque(maxlen=MAX_STEPS)
        self.incidents: deque[dict[str, Any]] = deque(maxlen=MAX_INCIDENTS)
        self.num_steps = self.num_incidents = 0  # ever
        self.num_skipped = 0  # records that were not read
        self._window: deque[Records] = deque()  # the last seconds, in order
        self._older: Records = np.empty(0, RECORD_DTYPE)  # of kind OLDER, from before them
        self._tracer = tracer
        self._readers: list[Reader] = []
        self._cursors: list[int] = []
        self._fold = StepFold()

    def refresh(self) -> None:
        """Reads what the rings hold that is new."""
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
        self._note_incidents(records)

    def window(self) -> tuple[list[Records], list[str]]:
        """The records of the last seconds, with those from before that say how things have been since; and the names
        that they mean. Do not change them."""
        return [self._older, *self._window], self._readers[0].names() if self._readers else []

    def steps_since(self, number: int) -> tuple[list[StepRow], int]:
        """Those after the `number` first ones, as far as they are kept, and how many there have been."""
        return _tail(self.steps, self.num_steps - number), self.num_steps

    def incidents_since(self, number: int) -> tuple[list[dict[str, Any]], int]:
        """As `steps_since`."""
        return _tail(self.incidents, self.num_incidents - number), self.num_incidents

    def _read(self, place: int) -> Records:
        reader, cursor = self._readers[place], self._cursors[place]
        num_written = reader.header()["num_written"]
        first = max(cursor, num_written - MAX_BEHIND)
        records, self._cursors[place], num_lost = reader.read_since(first)
        if skipped := first - cursor + num_lost:
            self.num_skipped += skipped
            self._fold = StepFold()  # what it knows of rows ends at the gap
        return records

    def _keep(self, records: Records) -> None:
        self._window.append(records)
        since_ns = int(records["time_ns"][-1]) - WINDOW_NS
        while int(self._window[0]["time_ns"][-1]) < since_ns:
            left = self._window.popleft()
            self._older = np.concatenate([self._older, left[np.isin(left["kind"], OLDER)]])[-MAX_OLDER:]

    def _note_incidents(self, records: Records) -> None:
        is_one = np.isin(records["kind"], INCIDENTS)
        is_one &= ~np.isin(records["kind"], PAUSES) | (records["a"] >= MIN_PAUSE_US)
        if not is_one.any():
            return
        found = list(as_dicts(records[is_one][-MAX_INCIDENTS:], self._readers[0].names()))
        self.incidents.extend(found)
        self.num_incidents += len(found)


def _tail(items: deque[Any], count: int) -> list[Any]:
    kept = min(count, len(items))
    return [items[place] for place in range(len(items) - kept, len(items))] if kept else []
