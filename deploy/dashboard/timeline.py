"""The timeline of one request, step by step, read from the trace while a viewer shows the request.

Times are in microseconds from the request's arrival. Records that have left the trace's rings are missing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...runtime.trace.format import ENGINE_STEPS
from ...runtime.trace.tracer import EventKind, Records, in_order_of_time
from .derived import ReadsTrace

ROWS = (EventKind.ROW_EXTEND, EventKind.ROW_DECODE, EventKind.ROW_LEAVE)
NO_TIMES = np.empty(0, np.int64)
MAX_STEP_GAP_US = 20_000  # longer gaps between the steps of a sequence are shown


class TimelineRow(NamedTuple):
    """One change of a sequence's row in the steps."""

    step: int
    kind: int
    start: int  # tokens computed before
    num_tokens: int  # of a row that decodes: the number of lanes
    time_us: int = 0


@dataclass(slots=True)
class TimelinePiece:
    """A period of one kind in a sequence's life."""

    kind: str  # wait, prefill, decode, preempted, gap, after
    begin_us: int
    end_us: int | None  # None: it continues
    num_tokens: int = 0  # computed prompt tokens, or generated tokens
    is_back: bool = False  # the sequence was preempted before this piece

    def to_json(self) -> tuple[str, int, int | None, int]:
        return self.kind, self.begin_us, self.end_us, self.num_tokens


@dataclass(slots=True)
class StepTimes:
    """Start and end of completed steps; each array [T], in order of the numbers."""

    numbers: NDArray[np.int64] = field(default_factory=lambda: NO_TIMES)
    begin_us: NDArray[np.int64] = field(default_factory=lambda: NO_TIMES)
    end_us: NDArray[np.int64] = field(default_factory=lambda: NO_TIMES)

    def extend(self, done: Records) -> None:
        """Appends STEP_DONE records."""
        end_us = (done["time_ns"] // 1000).astype(np.int64)
        self.numbers = np.concatenate([self.numbers, done["step"].astype(np.int64)])
        self.begin_us = np.concatenate([self.begin_us, end_us - done["c"]])
        self.end_us = np.concatenate([self.end_us, end_us])
        if np.any(np.diff(self.numbers) < 0):  # steps of several engine processes come mixed
            order = np.argsort(self.numbers, kind="stable")
            self.numbers, self.begin_us, self.end_us = self.numbers[order], self.begin_us[order], self.end_us[order]

    def between(self, first: int, last: int | None) -> slice:
        """The slice of steps with numbers in [first, last); None: up to the newest of the same engine process."""
        last = first + ENGINE_STEPS if last is None else last
        low, high = np.searchsorted(self.numbers, (first, last)).tolist()
        return slice(low, high)

    def until(self, first: int, time_us: int) -> slice:
        """The slice of steps with numbers from `first`, of the same engine process, that ended by a time."""
        done = self.between(first, None)
        return slice(done.start, done.start + int(np.searchsorted(self.end_us[done], time_us, "right")))


class Timeline:
    """The timeline of one request by id, live or ended. Call `refresh`, then `tell`."""

    def __init__(self, readers: Callable[[], Sequence[ReadsTrace]], request_id: str) -> None:
        self._find_readers = readers
        self.request_id = request_id
        self._readers: list[ReadsTrace] = []
        self._cursors: list[int] = []
        self._first: int | None = None  # its first sequence id
        self._arrival_us = 0
        self._rows: dict[int, list[TimelineRow]] = {}  # by sequence id
        self._steps = StepTimes()
        self._ended_us: int | None = None
        self._cause = ""
        self._num_prompt = self._num_generated = 0

    def refresh(self) -> None:
        """Reads new records of the rings; the first time, all records."""
        readers = self._find_readers()
        self._cursors += [0] * (len(readers) - len(self._readers))
        self._readers += readers[len(self._readers) :]
        parts = []
        for place, reader in enumerate(self._readers):
            records, self._cursors[place], _ = reader.read_since(self._cursors[place])
            parts.append(records)
        records = in_order_of_time(parts)
        if self._first is None:
            records = self._find(records)
        if self._first is not None and len(records):
            self._take(records)

    @property
    def sequence_id(self) -> int | None:
        """The id of the request's first sequence; None if the request was not found."""
        return self._first

    @property
    def is_over(self) -> bool:
        """Whether the request has ended."""
        return self._ended_us is not None

    def to_json(self) -> dict[str, Any] | None:
        """The timeline as plain data; None if the request was not found."""
        if self._first is None:
            return None
        sequences = []
        for sequence_id, rows in self._rows.items():
            pieces, ticks_us = self._pieces(rows)
            ticks_us = [t for t in ticks_us if self._ended_us is None or t <= self._ended_us]
            row = {"sequence_id": sequence_id, "pieces": [piece.to_json() for piece in pieces], "ticks_us": ticks_us}
            sequences.append(row | {"num_cached_tokens": rows[0].start if rows else 0})
        return {
            "id": self.request_id,
            "arrival_s": self._arrival_us / 1e6,
            "ended_us": self._ended_us,
            "cause": self._cause or None,
            "num_prompt_tokens": self._num_prompt,
            "num_generated_tokens": self._num_generated,
            "sequences": sequences,
        }

    # -- reading

    def _find(self, records: Records) -> Records:
        """Searches for the request's name. Returns the records from its arrival on."""
        named = records[records["kind"] == EventKind.REQUEST_NAME]
        text = self.request_id.encode()
        candidates: NDArray[Any] | None = None
        for at in range(0, len(text), 12):
            b, c, d = struct.unpack("<III", text[at : at + 12].ljust(12, b"\0"))
            found = named["a"][(named["b"] == b) & (named["c"] == c) & (named["d"] == d)]
            candidates = found if candidates is None else np.intersect1d(candidates, found)
        if candidates is None or not len(candidates):
            return records[:0]
        first = int(candidates.max())  # the newest, if the id was reused
        accepted = (records["kind"] == EventKind.REQUEST_ACCEPTED) & (records["a"] == first)
        if not accepted.any():
            return records[:0]
        place = int(np.flatnonzero(accepted)[0])
        self._first, self._arrival_us = first, int(records["time_ns"][place]) // 1000
        self._rows = {sequence_id: [] for sequence_id in range(first, first + int(records["b"][place]))}
        return records[place:]

    def _take(self, records: Records) -> None:
        self._steps.extend(records[records["kind"] == EventKind.STEP_DONE])
        ids = list(self._rows)
        own = np.isin(records["kind"], ROWS) & (records["a"] >= ids[0]) & (records["a"] <= ids[-1])
        for time_ns, kind, _, step, sequence_id, _, start, num_tokens in records[own].tolist():
            self._rows[sequence_id].append(TimelineRow(step, kind, start, num_tokens, time_ns // 1000))
        names = self._readers[0].names()
        over = records[(records["kind"] == EventKind.REQUEST_FINISHED) & (records["a"] == self._first)]
        if len(over) and self._ended_us is None:
            self._ended_us = int(over["time_ns"][0]) // 1000 - self._arrival_us
            self._cause = names[int(over["b"][0])]
            self._num_prompt, self._num_generated = int(over["c"][0]), int(over["d"][0])

    # -- output

    def _pieces(self, rows: list[TimelineRow]) -> tuple[list[TimelinePiece], list[int]]:
        """(consecutive pieces of a sequence, times of its tokens)."""
        worked: list[TimelinePiece] = []
        ticks: list[int] = []
        has_left = False
        for row, following in pairwise([*rows, None]):
            assert row is not None
            if row.kind == EventKind.ROW_LEAVE:
                has_left = True
                continue
            is_prefill = row.kind == EventKind.ROW_EXTEND
            last = row.step + 1 if is_prefill else None if following is None else following.step
            if last is None or 0 <= last - row.step < ENGINE_STEPS:
                done = self._steps.between(row.step, last)
            else:  # it went on in another engine process
                done = self._steps.until(row.step, following.time_us if following is not None else 0)
            every = 1 if is_prefill else max(1, row.num_tokens)
            is_own = (self._steps.numbers[done] - row.step) % every == 0
            ends = self._steps.end_us[done][is_own] - self._arrival_us
            if not len(ends):
                continue
            begin_us = int(self._steps.begin_us[done][is_own][0]) - self._arrival_us
            if not is_prefill or (following is not None and following.kind == EventKind.ROW_DECODE):
                ticks += ends.tolist()
            num_tokens = row.num_tokens if is_prefill else len(ends)
            kind = "prefill" if is_prefill else "decode"
            worked.append(TimelinePiece(kind, begin_us, int(ends[-1]), num_tokens, has_left))
            has_left = False
        return list(self._filled(_joined(worked))), ticks

    def _filled(self, worked: list[TimelinePiece]) -> Iterator[TimelinePiece]:
        """Adds the pieces before, between and after, up to the end of the request."""
        at, limit = 0, self._ended_us
        for piece in worked:
            piece.begin_us = max(at, piece.begin_us)
            if limit is not None and piece.begin_us >= limit:
                break  # steps that were in flight when it ended
            if at and not piece.is_back and piece.begin_us - at <= MAX_STEP_GAP_US:
                piece.begin_us = at
            if piece.begin_us > at:
                yield TimelinePiece("preempted" if piece.is_back else "gap" if at else "wait", at, piece.begin_us)
            assert piece.end_us is not None
            at = piece.end_us = piece.end_us if limit is None else min(piece.end_us, limit)
            yield piece
        if limit is None or limit > at:
            yield TimelinePiece("after" if at else "wait", at, limit)


def _joined(pieces: list[TimelinePiece]) -> list[TimelinePiece]:
    """Merges neighbours of one kind that are at most `MAX_STEP_GAP_US` apart."""
    joined: list[TimelinePiece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and last.end_us is not None and _continues(last.kind, last.end_us, piece):
            last.end_us = piece.end_us
            last.num_tokens += piece.num_tokens
        else:
            joined.append(piece)
    return joined


def _continues(kind: str, end_us: int, piece: TimelinePiece) -> bool:
    return piece.kind == kind and not piece.is_back and piece.begin_us - end_us <= MAX_STEP_GAP_US
