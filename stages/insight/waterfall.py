"""The waterfall of a request: consecutive bars from its arrival to its end, without gaps.

    arrival  |intake|tokenize|..wait..|schedule|allocate|execute......|sample|detokenize|exit|  end

At each moment a request is where its oldest unfinished step is. Work on its later steps in the meantime is hidden and
has no bar. So a slow stage has a longer bar only where other stages wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from ...runtime.trace.format import ENGINE_STEPS
from ...runtime.trace.tracer import EventKind, Records
from .trace_view import SAMPLE, SCHEDULE, StageBatches, TraceView

Kind = Literal["service", "wait", "blocked", "preempted", "client"]


@dataclass(frozen=True, slots=True)
class TimeBar:
    """A part of a request's life [begin_ns, end_ns), on the trace's clock.

    service    `stage` worked on it
    wait       it waited for `stage`
    blocked    `stage` was done, and its output channel was full
    preempted  it had lost its blocks or its slot; `stage` is how: swap, recompute or rope
    client     it was parked, as its client did not read
    """

    kind: Kind
    stage: str
    begin_ns: int
    end_ns: int
    step: int | None = None

    @property
    def ns(self) -> int:
        """Its length."""
        return self.end_ns - self.begin_ns


@dataclass(frozen=True, slots=True)
class StepPart:
    """What a request had in one step: prompt tokens, or one token for each of its rows."""

    step: int
    num_prompt_tokens: int
    num_decodes: int


@dataclass(frozen=True, slots=True)
class Waterfall:
    """A request's life.

    The bars are in order, each begins where the one before ends, and they fill [begin, end).
    """

    sequence_id: int  # of its first sequence
    num_sequences: int
    begin_ns: int
    end_ns: int
    cause: str | None  # why it ended; None: it has not ended
    bars: list[TimeBar]
    steps: list[StepPart]
    num_preemptions: int

    def total_ns(self, kind: Kind, stage: str | None = None) -> int:
        """Total of all bars of a kind, and of a stage if given."""
        return sum(bar.ns for bar in self.bars if bar.kind == kind and stage in (None, bar.stage))


def waterfall(view: TraceView, sequence_id: int, now_ns: int | None = None) -> Waterfall | None:
    """The waterfall of the request whose first sequence is `sequence_id`, up to its end.

    While it is live, up to `now_ns` (default: the last record's time). None if the trace does not reach back to its
    arrival.
    """
    accepted = view.of_request(EventKind.REQUEST_ACCEPTED, sequence_id)
    if not len(accepted):
        return None
    num_sequences, arrival_ns = int(accepted["b"][0]), int(accepted["time_ns"][0])
    sequence_ids = range(sequence_id, sequence_id + num_sequences)
    finished = view.of_request(EventKind.REQUEST_FINISHED, sequence_id)
    cause = view.names[int(finished["b"][0])] if len(finished) else None
    end_ns = int(finished["time_ns"][0]) if len(finished) else max(view.end_ns, now_ns or 0)
    gates = list(_gates(view, sequence_id, arrival_ns))
    begin_ns = min([arrival_ns, *(bar.begin_ns for bar in gates)])
    steps = _steps(view, sequence_ids, end_ns)
    preempted = _preempted(view, sequence_ids, end_ns)
    away = [*_parked(view, sequence_ids, end_ns), *preempted]
    spans = [*gates, *_spans(view, sequence_id, steps)]
    next_stage = "exit" if cause is not None else "execute" if steps else SCHEDULE
    bars = list(_without_holes(spans, away, begin_ns, end_ns, next_stage))
    return Waterfall(sequence_id, num_sequences, begin_ns, end_ns, cause, bars, steps, len(preempted))


# -- bars in the order in which a token is made


def _gates(view: TraceView, sequence_id: int, arrival_ns: int) -> Iterator[TimeBar]:
    """The waits for its adapter and then its grammar, before admission."""
    grammar = view.of_request(EventKind.REQUEST_GRAMMAR, sequence_id)
    grammar_ns = arrival_ns - (int(grammar["b"][0]) * 1000 if len(grammar) else 0)
    for record in view.of_request(EventKind.REQUEST_ADAPTER, sequence_id):
        yield TimeBar("wait", "adapter", grammar_ns - int(record["b"]) * 1000, grammar_ns)
    if len(grammar):
        yield TimeBar("wait", "grammar", grammar_ns, arrival_ns)


def _spans(view: TraceView, sequence_id: int, steps: list[StepPart]) -> Iterator[TimeBar]:
    """The stages before its first step, then the stages of each of its steps."""
    for record in view.of_request(EventKind.REQUEST_STAGE, sequence_id):
        stage, end_ns = view.names[int(record["source"])], int(record["time_ns"])
        served_ns = end_ns - int(record["d"]) * 1000
        yield TimeBar("service", stage, served_ns - int(record["c"]) * 1000, served_ns)
        yield TimeBar("blocked", stage, served_ns, end_ns)
    for part in steps:
        yield from _spans_of_step(view, part.step)


def _spans_of_step(view: TraceView, step: int) -> Iterator[TimeBar]:
    planned, batches = view.of_step(EventKind.STEP_PLANNED, step), view.schedule_batches
    if planned is not None and batches is not None:
        place = int(np.searchsorted(batches.ends, int(planned["time_ns"])))
        if place < len(batches.ends):
            yield TimeBar("service", SCHEDULE, int(batches.begins[place]), int(batches.service_ends[place]), step)
    spans = []
    executed, done = view.of_step(EventKind.STEP_EXECUTED, step), view.of_step(EventKind.STEP_DONE, step)
    if executed is not None:
        end_ns = int(executed["time_ns"])
        stage = view.names[int(executed["source"])]
        spans.append(TimeBar("service", stage, end_ns - int(executed["c"]) * 1000, end_ns, step))
    for stage_batches in view.step_batches:
        spans += _spans_of_batch(stage_batches, step, executed, done)
    yield from sorted(spans, key=lambda bar: (bar.begin_ns, bar.end_ns))


def _spans_of_batch(
    batches: StageBatches, step: int, executed: np.void | None, done: np.void | None
) -> Iterator[TimeBar]:
    """A stage's own bar for a step.

    Sample gets a step before its forward pass has ended; until then it waits.
    """
    place = batches.of_step(step)
    if place is None:
        return
    begin_ns, served_ns = int(batches.begins[place]), int(batches.service_ends[place])
    if batches.stage == SAMPLE:
        begin_ns = begin_ns if executed is None else max(begin_ns, int(executed["time_ns"]))
        served_ns = served_ns if done is None else int(done["time_ns"])
        yield TimeBar("service", batches.stage, begin_ns, served_ns, step)
        return
    yield TimeBar("service", batches.stage, begin_ns, served_ns, step)
    yield TimeBar("blocked", batches.stage, served_ns, int(batches.ends[place]), step)


# -- rows


def _steps(view: TraceView, sequence_ids: range, end_ns: int) -> list[StepPart]:
    """The request's steps, without void ones, up to the last one granted before `end_ns`."""
    prompts: dict[int, int] = {}
    decodes: dict[int, int] = {}
    for sequence_id in sequence_ids:
        rows, num_prompt = view.rows_of(sequence_id), view.num_prompt_tokens(sequence_id)
        for row, following in pairwise([*rows, None]):
            step = int(row["step"])
            next_step, until_ns = None, end_ns
            if following is not None:
                next_step = int(following["step"])
                if not 0 <= next_step - step < ENGINE_STEPS:  # it went on in another engine process
                    next_step, until_ns = None, min(end_ns, int(following["time_ns"]))
            last_step = _last_step(view.of(EventKind.STEP_GRANTED), step, until_ns)
            if last_step < step:
                continue
            if row["kind"] == EventKind.ROW_EXTEND:
                prompts[step] = prompts.get(step, 0) + int(row["d"])
            elif row["kind"] == EventKind.ROW_DECODE:
                every = max(1, int(row["d"]))
                if int(row["c"]) < num_prompt:  # the rest of a prompt may be a single token
                    prompts[step] = prompts.get(step, 0) + 1
                    step += every
                end = last_step + 1 if next_step is None else min(next_step, last_step + 1)
                for later in range(step, end, every):
                    decodes[later] = decodes.get(later, 0) + 1
    steps = sorted({*prompts, *decodes} - view.void_steps)
    return [StepPart(step, prompts.get(step, 0), decodes.get(step, 0)) for step in steps]


def _last_step(granted: Records, first: int, time_ns: int) -> int:
    """The last step from `first` on, of the same engine process, granted by a time; `first - 1` if there is none."""
    steps = granted["step"][: int(np.searchsorted(granted["time_ns"], time_ns, "right"))].astype(np.int64)
    steps = steps[(steps >= first) & (steps < first + ENGINE_STEPS)]
    return int(steps.max()) if len(steps) else first - 1


def _preempted(view: TraceView, sequence_ids: range, end_ns: int) -> list[TimeBar]:
    """From each loss of its slot or its blocks to its next row."""
    found = []
    for sequence_id, time_ns, how in view.preemptions:
        if sequence_id in sequence_ids and time_ns < end_ns:
            rows = view.rows_of(sequence_id)
            later = rows[(rows["time_ns"] > time_ns) & (rows["kind"] != EventKind.ROW_LEAVE)]
            back_ns = int(later["time_ns"][0]) if len(later) else end_ns
            found.append(TimeBar("preempted", how, time_ns, min(back_ns, end_ns)))
    return found


def _parked(view: TraceView, sequence_ids: range, end_ns: int) -> Iterator[TimeBar]:
    """From each time it was parked to the time it was unparked."""
    unparked = view.of(EventKind.UNPARKED)
    for record in view.of(EventKind.PARKED):
        time_ns, sequence_id = int(record["time_ns"]), int(record["c"])
        if sequence_id in sequence_ids and time_ns < end_ns:
            later = unparked[(unparked["c"] == sequence_id) & (unparked["time_ns"] >= time_ns)]
            back_ns = int(later["time_ns"][0]) if len(later) else end_ns
            yield TimeBar("client", "", time_ns, min(back_ns, end_ns))


# -- joining bars


def _without_holes(
    spans: Iterable[TimeBar], away: Iterable[TimeBar], begin_ns: int, end_ns: int, next_stage: str
) -> Iterator[TimeBar]:
    """Cuts each span by those before it.

    Fills gaps with waits for the next span, the last with a wait for `next_stage`. Times in `away` replace waits.
    """
    away = sorted(away, key=lambda bar: bar.begin_ns)
    cursor_ns = begin_ns
    for span in [*spans, TimeBar("wait", next_stage, end_ns, end_ns)]:
        span_begin_ns, span_end_ns = min(max(span.begin_ns, cursor_ns), end_ns), min(span.end_ns, end_ns)
        if span_end_ns <= cursor_ns and span.begin_ns < end_ns:
            continue  # hidden
        yield from _gap(cursor_ns, span_begin_ns, span, away)
        if span_end_ns > span_begin_ns:
            yield replace(span, begin_ns=span_begin_ns, end_ns=span_end_ns)
        cursor_ns = max(cursor_ns, span_begin_ns, span_end_ns)


def _gap(begin_ns: int, end_ns: int, until: TimeBar, away: list[TimeBar]) -> Iterator[TimeBar]:
    cursor_ns = begin_ns
    for bar in away:
        away_begin_ns, away_end_ns = max(bar.begin_ns, cursor_ns), min(bar.end_ns, end_ns)
        if away_begin_ns < away_end_ns:
            if cursor_ns < away_begin_ns:
                yield TimeBar("wait", until.stage, cursor_ns, away_begin_ns, until.step)
            yield replace(bar, begin_ns=away_begin_ns, end_ns=away_end_ns)
            cursor_ns = away_end_ns
    if cursor_ns < end_ns:
        yield TimeBar("wait", until.stage, cursor_ns, end_ns, until.step)
