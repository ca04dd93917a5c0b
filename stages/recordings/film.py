"""A recording loaded for viewing: its trace, its requests, and its latencies.

The real stages write their part of the trace as they decide again. Events of other stages are derived from the inputs
of schedule, as far as possible: when requests came and ended, and when steps were done. So the code that reads a live
trace (waterfalls, bottlenecks, steps) also reads a recording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.simulation.manual_env import ManualEnv
from ...runtime.trace.format import MAX_U32, RECORD_DTYPE
from ...runtime.trace.tracer import EventKind, Records, RingReader, Tracer, in_order_of_time
from ..messages import StepDone, StepVoid, TokenRequest
from ..schedule.policy import Policy
from .reader import AllocateCall, Call, Recording, RecordingError, ScheduleCall
from .replay import ReplayedCore
from .time_machine import TimeMachine

FRONT = "before schedule"  # intake, tokenize and users' stages, which a recording does not tell apart
DRAIN_CALLS = 32  # after this many calls their trace is taken out of the ring
PROGRESS_CALLS = 256  # between two reports of progress

Times = NDArray[np.int64]


@dataclass(slots=True)
class RecordedRequest:
    """One request, as schedule saw it. Times on the engine's clock; None: it did not happen."""

    request_id: str
    first_sequence_id: int
    arrival_s: float
    priority: int
    max_tokens: int | None = None  # of all its choices
    num_sequences: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    began_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    cause: str = ""  # why it ended: finish, cancel, ...


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Measurements, [N] each: times in ns on the engine's clock, in order, and durations in us."""

    when_ns: Times
    us: Times

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> MeasuredTimes:
        """From (when, how long) pairs, both in seconds."""
        rows = np.array(pairs, np.float64).reshape(-1, 2)
        when_ns, us = np.round(rows[:, 0] * 1e9).astype(np.int64), np.maximum(0, rows[:, 1] * 1e6).astype(np.int64)
        order = np.argsort(when_ns, kind="stable")
        return cls(when_ns[order], us[order])

    def until(self, now_ns: int) -> Times:
        """The durations measured up to `now_ns`, in us."""
        return self.us[: int(np.searchsorted(self.when_ns, now_ns, "right"))]


@dataclass(frozen=True, slots=True, eq=False)
class Film:
    """The part of a recording that could be replayed.

    Times are on the engine's clock, where it begins at `began_s`.
    """

    recording: Recording
    records: Records  # the trace, in order of time
    names: list[str]  # the name table of the records
    recorded: dict[str, RecordedRequest]  # by request id, in order of arrival
    latencies: dict[str, MeasuredTimes]  # by their names in `/metrics`
    duration_s: float
    num_calls: int
    num_decisions: int
    decision_hash: str
    trouble: str | None  # why the replay ended early
    machine: TimeMachine  # with marks over the whole recording

    @property
    def began_s(self) -> float:
        """When the recording began."""
        return self.recording.began_s

    def place(self, now_ns: int) -> int:
        """The number of records up to `now_ns`."""
        return int(np.searchsorted(self.records["time_ns"], max(0, now_ns), "right"))

    def of(self, kind: EventKind) -> Records:
        """The records of one kind."""
        chosen: Records = self.records[self.records["kind"] == kind]
        return chosen


def film(
    recording: Recording, policy: Policy | None = None, progress: Callable[[float], object] = lambda time_s: None
) -> Film:
    """Replays a recording. `progress` is called now and then with the time reached.

    Raises `RecordingError` if nothing can be replayed.
    """
    return _FilmRun(recording, policy).run(progress)


@dataclass(slots=True)
class _Sequence:
    """One choice of a request during the replay."""

    life: RecordedRequest
    num_generated: int = 0
    last_token_s: float = 0.0


@dataclass(slots=True)
class _Rows:
    """Records written by this module."""

    rows: list[tuple[int, ...]] = field(default_factory=list)

    def put(self, time_s: float, kind: EventKind, source: int, step: int = 0, *values: int) -> None:
        clipped = [min(max(0, int(value)), MAX_U32) for value in (step, *values, 0, 0, 0, 0)[:5]]
        self.rows.append((round(max(0.0, time_s) * 1e9), kind, source, *clipped))

    def records(self) -> Records:
        return np.array(self.rows, RECORD_DTYPE)


class _FilmRun:
    """One replay of a recording."""

    def __init__(self, recording: Recording, policy: Policy | None) -> None:
        env = ManualEnv()
        env.time_s = recording.began_s
        self._recording = recording
        self._tracer = Tracer(env)
        core = ReplayedCore(recording.engine, policy, env, self._tracer)
        self._machine = TimeMachine(recording, policy, core)
        self._own = _Rows()
        self._traced: list[Records] = []
        self._reader: RingReader | None = None
        self._cursor = 0
        self._recorded: dict[str, RecordedRequest] = {}
        self._alive: dict[int, _Sequence] = {}  # by id
        self._granted: dict[int, tuple[float, int, int]] = {}  # step -> (when, rows, tokens)
        self._done_s = 0.0
        self._first_tokens: list[tuple[float, float]] = []
        self._gaps: list[tuple[float, float]] = []
        source = self._tracer.source
        self._front, self._schedule, self._execute = source(FRONT), source("schedule"), source("execute")
        self._sample, self._exit = source("sample"), source("exit")

    def run(self, progress: Callable[[float], object]) -> Film:
        trouble, time_s, replay = None, 0.0, self._machine.replay
        try:
            for number, (call, _) in enumerate(self._machine.calls()):
                time_s = call.time_s
                self._take(call, self._recording.began_s + time_s)
                if number % DRAIN_CALLS == 0:
                    self._drain()
                if number % PROGRESS_CALLS == 0:
                    progress(time_s)
        except RecordingError as error:
            if not replay.num_calls:
                raise
            trouble = str(error)
        if trouble is None and self._recording.end != "closed":
            trouble = (
                f"the recording ended early: {self._recording.end or 'its last line was cut off, or never written'}"
            )
        self._close()
        self._drain()
        return Film(
            recording=self._recording,
            records=in_order_of_time([self._own.records(), *self._traced]),
            names=self._tracer.names(),
            recorded=self._recorded,
            latencies=self._latencies(),
            duration_s=time_s,
            num_calls=replay.num_calls,
            num_decisions=replay.num_decisions,
            decision_hash=replay.decision_hash,
            trouble=trouble,
            machine=self._machine.another(),
        )

    def _drain(self) -> None:
        if self._reader is None and (readers := self._tracer.readers()):
            (self._reader,) = readers  # all is written on this thread
        if self._reader is not None:
            records, self._cursor, num_lost = self._reader.read_since(self._cursor)
            assert not num_lost, f"{num_lost} records of {DRAIN_CALLS} calls did not fit in the ring"
            self._traced.append(records)

    # -- events of a call

    def _take(self, call: Call, now_s: float) -> None:
        match call:
            case ScheduleCall():
                for message in call.taken:
                    if isinstance(message, TokenRequest):
                        self._came(message, now_s)
                    elif isinstance(message, StepDone):
                        self._done(message, now_s)
                    elif isinstance(message, StepVoid):
                        num_rows = self._granted.pop(message.step, (0.0, 0, 0))[1]
                        self._own.put(now_s, EventKind.STEP_VOID, self._sample, message.step, num_rows)
                for sequence_id, cause in call.lane:
                    if cause not in ("park", "unpark"):
                        self._over(sequence_id, now_s, cause)
                for sequence_id in call.failed:
                    self._over(sequence_id, now_s, "error")
                self._own.put(now_s, EventKind.STAGE_BATCH, self._schedule, 0, len(call.taken))
            case AllocateCall():
                for grant in call.grants:
                    if grant is not None:
                        self._begun(grant, now_s)

    def _came(self, request: TokenRequest, now_s: float) -> None:
        life, params = self._recorded.get(request.request_id), request.params
        if life is None or life.ended_s is not None:
            made = (request.request_id, request.first_sequence_id, request.arrival_s, request.priority)
            life = self._recorded[request.request_id] = RecordedRequest(*made)
            front_us = max(0, int((now_s - request.arrival_s) * 1e6))
            self._own.put(now_s, EventKind.REQUEST_STAGE, self._front, 0, request.first_sequence_id, 0, front_us)
        life.first_sequence_id = min(life.first_sequence_id, request.first_sequence_id)
        life.num_sequences += params.n
        life.num_prompt_tokens += len(request.token_ids)
        if params.max_tokens is not None:
            life.max_tokens = (life.max_tokens or 0) + params.n * params.max_tokens
        counts = (request.first_sequence_id, len(request.token_ids), 0)
        self._own.put(now_s, EventKind.REQUEST_TOKENIZED, self._front, 0, *counts)
        for number in range(params.n):
            self._alive[request.first_sequence_id + number] = _Sequence(life)

    def _begun(self, grant: dict[str, Any], now_s: float) -> None:
        num_tokens = sum(grant["num_tokens"])
        self._granted[grant["step"]] = now_s, len(grant["slots"]), num_tokens
        for _, sequence_id, num_cached, _ in grant["started"]:
            sequence = self._alive.get(sequence_id)
            if sequence is not None and sequence.life.began_s is None:
                sequence.life.began_s, sequence.life.num_cached_tokens = now_s, num_cached

    def _done(self, done: StepDone, now_s: float) -> None:
        granted_s, num_rows, num_tokens = self._granted.pop(done.step, (now_s, 0, 0))
        took_us = int((now_s - max(granted_s, self._done_s)) * 1e6)
        self._put_time(now_s, took_us)
        self._done_s = now_s
        counts = (num_rows, num_tokens, took_us)
        self._own.put(now_s, EventKind.STEP_EXECUTED, self._execute, done.step, *counts)
        ended = (len(done.slots), int(np.count_nonzero(done.is_finished)), took_us)
        self._own.put(now_s, EventKind.STEP_DONE, self._sample, done.step, *ended)
        rows = zip(done.sequence_ids.tolist(), done.places.tolist(), done.is_finished.tolist(), strict=True)
        for sequence_id, place, is_finished in rows:
            sequence = self._alive.get(sequence_id)
            if sequence is not None:
                self._token(sequence, place, now_s)
                if is_finished:
                    self._over(sequence_id, now_s, "finish")

    def _put_time(self, now_s: float, took_us: int) -> None:
        """Notes how execute spent the time since the step before."""
        before_s = self._done_s or self._recording.began_s
        idle_us = max(0, int((now_s - before_s) * 1e6) - took_us)
        self._own.put(now_s, EventKind.STAGE_TIME, self._execute, 0, took_us, 0, idle_us)

    def _token(self, sequence: _Sequence, place: int, now_s: float) -> None:
        life = sequence.life
        if life.first_token_s is None:
            life.first_token_s = now_s
            self._first_tokens.append((now_s, now_s - life.arrival_s))
        if sequence.num_generated:
            self._gaps.append((now_s, now_s - sequence.last_token_s))
        life.num_generated_tokens += place + 1 - sequence.num_generated
        sequence.num_generated, sequence.last_token_s = place + 1, now_s

    def _over(self, sequence_id: int, now_s: float, cause: str) -> None:
        sequence = self._alive.pop(sequence_id, None)
        if sequence is None:
            return
        life = sequence.life
        ids = range(life.first_sequence_id, life.first_sequence_id + life.num_sequences)
        if not any(each in self._alive for each in ids):
            life.ended_s, life.cause = now_s, cause

    # -- at the end

    def _close(self) -> None:
        """Writes the records of the requests' arrivals, names and ends."""
        env, tracer = self._tracer_env(), self._tracer
        for number, life in enumerate(self._recorded.values()):
            first = life.first_sequence_id
            arrival_s = max(self._recording.began_s, life.arrival_s)
            counts = (first, life.num_sequences, max(0, life.priority))
            self._own.put(arrival_s, EventKind.REQUEST_ACCEPTED, self._exit, 0, *counts)
            env.time_s = arrival_s
            tracer.emit_request_name(self._exit, first, life.request_id)
            if number % DRAIN_CALLS == 0:
                self._drain()
            if life.ended_s is not None:
                counts = (tracer.source(life.cause), life.num_prompt_tokens, life.num_generated_tokens)
                self._own.put(life.ended_s, EventKind.REQUEST_FINISHED, self._exit, 0, first, *counts)

    def _tracer_env(self) -> ManualEnv:
        return self._machine.core.env

    def _latencies(self) -> dict[str, MeasuredTimes]:
        recorded = self._recorded.values()
        began = [(life.began_s, life.began_s - life.arrival_s) for life in recorded if life.began_s is not None]
        ended = [
            (life.ended_s, life.ended_s - life.arrival_s)
            for life in recorded
            if life.ended_s is not None and life.cause == "finish"
        ]
        return {
            "time_to_first_token": MeasuredTimes.of(self._first_tokens),
            "inter_token_latency": MeasuredTimes.of(self._gaps),
            "request_queue_time": MeasuredTimes.of(began),
            "e2e_request_latency": MeasuredTimes.of(ended),
        }


def block_changes(records: Records, names: Sequence[str]) -> tuple[Times, Times, Times]:
    """Changes of blocks' state or table, in order.

    (When in ns [C], first block [C], number of blocks [C]). A block enters a table when its step is granted, however
    late the record was written.
    """
    granted = records[records["kind"] == EventKind.STEP_GRANTED]
    ranges = records[records["kind"] == EventKind.KV_RANGE]
    ids = {name: names.index(name) if name in names else -1 for name in ("left", "in_use")}
    ranges = ranges[ranges["d"] != ids["left"]]
    times = ranges["time_ns"].astype(np.int64)
    is_used = ranges["d"] == ids["in_use"]
    places = np.searchsorted(granted["step"], ranges["step"][is_used])
    times[is_used] = granted["time_ns"][places]
    order = np.argsort(times, kind="stable")
    return times[order], ranges["b"][order].astype(np.int64), ranges["c"][order].astype(np.int64)
