"""Reads a recording line by line. The format is in `format.py`.

A file is not trusted. An invalid one is rejected with the line and the reason. Nothing in it is run or imported; sizes
are checked before anything of that size is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from ..messages import Guess, Rates, StepDone, StepVoid, TokenRequest
from .field_values import Fields, InvalidValue, MessageFields
from .format import VERSION, UnchangedFields, read_add, read_done, read_guess
from .format import read_void as _read_void
from .recorded_engine import RecordedEngine, read_engine
from .repetition import Repetition, read_repeats

MAX_LINE_BYTES = 64 * 2**20
MAX_ITEMS = 65_536  # of a list in a line
END_CAUSES = 512  # characters


class RecordingError(ValueError):
    """A recording that cannot be read or replayed. Names file and line."""


@dataclass(frozen=True, slots=True)
class ReportTaken:
    """Schedule received allocate's report of a step. Its content follows from the plan."""

    step: int


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleCall:
    """One `handle` of schedule: its inputs, and its decisions as plain values."""

    line: int
    time_s: float  # since the recording began
    taken: Sequence[TokenRequest | StepDone | StepVoid | ReportTaken | Guess]
    lane: Sequence[tuple[int, str]]  # (sequence, cause), in order
    plans: Sequence[Fields]
    failed: Sequence[int]  # sequences given up
    is_early: bool = False  # it was too early to plan
    repeats: Sequence[tuple[int, Repetition]] = ()  # of sequences that ended


@dataclass(frozen=True, slots=True, eq=False)
class AllocateCall:
    """One `handle` of allocate."""

    line: int
    time_s: float
    rates: Sequence[Rates]
    reports: Sequence[Fields]
    grants: Sequence[Fields | None]  # one for each report; None: the step was void


@dataclass(frozen=True, slots=True, eq=False)
class CacheResetCall:
    """A reset of the prefix cache."""

    line: int
    time_s: float
    num_freed: int  # blocks


Call = ScheduleCall | AllocateCall | CacheResetCall


class Recording:
    """A recording in a file. The first line is read at once.

    Each iteration starts at the beginning.

    Raises `RecordingError` if the file is not a recording. If it was cut off, as when its engine was killed, an
    incomplete last line is ignored. After reading all of it, `end` says how it ended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end: str | None = None  # "closed", why it stopped early, or None: not read yet, or cut off
        try:
            with path.open("rb") as file:
                header = self._parse(1, file.readline(MAX_LINE_BYTES + 1))
        except OSError as error:
            raise RecordingError(f"{path}: {error.strerror}: must name a recording") from None
        if not isinstance(header, dict) or header.get("millrace_recording") != VERSION:
            version = header.get("millrace_recording") if isinstance(header, dict) else None
            what = "this is not a recording" if version is None else f"a recording of format {version!r:.40}"
            raise RecordingError(f"{path}:1: {what}: `millrace serve --record FILE` writes format {VERSION}")
        try:
            self.engine: RecordedEngine = read_engine(header.get("engine"))
            given = MessageFields("header", header)
            self.began_s = given.number("began_s", -1e12)
            self.began_wall_s = given.number("began_wall_s")
            self.has_repeats = header.get("repeats") is not None
        except InvalidValue as error:
            raise RecordingError(f"{path}:1: {error}") from None

    def __iter__(self) -> RecordingReader:
        """The calls, in order."""
        return RecordingReader(self)

    def call(self, number: int, least_s: float, line: bytes, unchanged: UnchangedFields) -> Call | None:
        """The call in line `number`, whose time must be at least `least_s`; None for the last line.

        Raises `RecordingError`.
        """
        values = self._parse(number, line)
        if not isinstance(values, dict):
            raise RecordingError(f"{self.path}:{number}: must be a JSON object")
        try:
            given = MessageFields("line", values)
            if "end" in values:
                self.end = given.text("end", END_CAUSES)
                return None
            return self._call(number, given.number("t", least_s), values, unchanged)
        except InvalidValue as error:
            raise RecordingError(f"{self.path}:{number}: {error}") from None

    def _parse(self, number: int, line: bytes) -> Any:
        if len(line) > MAX_LINE_BYTES:
            raise RecordingError(f"{self.path}:{number}: a line of more than {MAX_LINE_BYTES >> 20} MiB")
        try:
            return orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise RecordingError(f"{self.path}:{number}: this is not JSON: {error}") from None

    # -- a line

    def _call(self, number: int, time_s: float, values: dict[str, Any], unchanged: UnchangedFields) -> Call:
        if "schedule" in values:
            return self._schedule(number, time_s, _object(values, "schedule"), unchanged)
        if "allocate" in values:
            return self._allocate(number, time_s, _object(values, "allocate"), unchanged)
        if "reset_prefix_cache" in values:
            return CacheResetCall(number, time_s, MessageFields("line", values).whole("reset_prefix_cache"))
        raise InvalidValue("must have schedule, allocate, reset_prefix_cache or end")

    def _schedule(self, number: int, time_s: float, values: dict[str, Any], unchanged: UnchangedFields) -> ScheduleCall:
        taken = [self._taken(item, unchanged) for item in _objects(values, "in")]
        plans: list[Fields] = [
            {"accepted": [], "adapter_loads": []} | unchanged.put_back("plan", plan)
            for plan in _objects(values, "plans")
        ]
        failed = MessageFields("schedule", {"failed": [], **values}).wholes("failed", 2**53)
        repeats = [read_repeats(each, self.engine) for each in _objects(values, "repeats")]
        is_early = MessageFields("schedule", {"is_early": False, **values}).flag("is_early")
        return ScheduleCall(number, time_s, taken, _lane(values), plans, failed, is_early, repeats)

    def _taken(
        self, item: dict[str, Any], unchanged: UnchangedFields
    ) -> TokenRequest | StepDone | StepVoid | ReportTaken | Guess:
        if "add" in item:
            return read_add(_object(item, "add"), self.engine)
        if "done" in item:
            return read_done(unchanged.put_back("done", _object(item, "done")), self.engine)
        if "void" in item:
            return _read_void(_object(item, "void"))
        if "report" in item:
            return ReportTaken(MessageFields("in", item).whole("report"))
        if "guess" in item:
            return read_guess(_object(item, "guess"), self.engine)
        raise InvalidValue("schedule.in: each must be one of add, done, void, report and guess")

    def _allocate(self, number: int, time_s: float, values: dict[str, Any], unchanged: UnchangedFields) -> AllocateCall:
        reports: list[Fields] = []
        grants: list[Fields | None] = []
        for answer in _objects(values, "answers"):
            reports.append(unchanged.put_back("report", _object(answer, "report")))
            granted = unchanged.put_back("grant", _object(answer, "grant")) if "grant" in answer else None
            grants.append(None if granted is None else {"adapter_loads": []} | granted)
        return AllocateCall(number, time_s, _rates(values), reports, grants)


class RecordingReader:
    """Iterates over the calls of a recording from some place on.

    `copy` continues from the same place independently.
    """

    def __init__(self, recording: Recording) -> None:
        recording.end = None
        self._recording = recording
        self._unchanged = UnchangedFields()
        self._number, self._offset, self._time_s = 1, -1, 0.0  # of the last line read; -1: none was read
        self._file: BinaryIO | None = None

    def __iter__(self) -> RecordingReader:
        return self

    def __next__(self) -> Call:
        if self._file is None:
            self._open()
        assert self._file is not None
        line = self._file.readline(MAX_LINE_BYTES + 1)
        is_whole = line.endswith(b"\n") or len(line) > MAX_LINE_BYTES  # `call` rejects a longer one
        call = self._recording.call(self._number + 1, self._time_s, line, self._unchanged) if is_whole else None
        if call is None:
            self.close()
            raise StopIteration
        self._number, self._offset, self._time_s = call.line, self._offset + len(line), call.time_s
        return call

    def copy(self) -> RecordingReader:
        """A second iterator at this place."""
        other = RecordingReader.__new__(RecordingReader)
        other._recording, other._unchanged = self._recording, self._unchanged.copy()
        other._number, other._offset, other._time_s = self._number, self._offset, self._time_s
        other._file = None
        return other

    def close(self) -> None:
        """Closes the file. Further reading opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        self._file = self._recording.path.open("rb")
        if self._offset < 0:
            self._offset = len(self._file.readline(MAX_LINE_BYTES + 1))
        else:
            self._file.seek(self._offset)

    def __del__(self) -> None:
        self.close()


def _rates(values: dict[str, Any]) -> list[Rates]:
    made = []
    for pair in _list(values, "rates"):
        if not isinstance(pair, list) or len(pair) != 2:
            raise InvalidValue("allocate.rates: each must be [copy_s, compute_s]")
        given = MessageFields("rates", dict(zip(("copy_s", "compute_s"), pair, strict=True)))
        made.append(Rates(given.number("copy_s"), given.number("compute_s")))
    return made


def _lane(values: dict[str, Any]) -> list[tuple[int, str]]:
    causes = []
    for pair in _list(values, "lane"):
        if not isinstance(pair, list) or len(pair) != 2:
            raise InvalidValue("schedule.lane: each must be [sequence, cause]")
        given = MessageFields("lane", dict(zip(("sequence_id", "cause"), pair, strict=True)))
        causes.append((given.whole("sequence_id", 0, 2**53), given.text("cause")))
    return causes


def _object(values: dict[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name)
    if not isinstance(found, dict):
        raise InvalidValue(f"{name} must be an object")
    return found


def _objects(values: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found = _list(values, name)
    if any(not isinstance(each, dict) for each in found):
        raise InvalidValue(f"{name} must be a list of objects")
    return found


def _list(values: dict[str, Any], name: str) -> list[Any]:
    found = values.get(name, [])
    if not isinstance(found, list) or len(found) > MAX_ITEMS:
        raise InvalidValue(f"{name} must be a list of at most {MAX_ITEMS}")
    return found
