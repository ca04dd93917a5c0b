"""A recording loaded for viewing: its trace equals the engine's, and any place is found again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from millrace.runtime.trace.tracer import EventKind, Records
from millrace.stages.insight.trace_view import TraceView
from millrace.stages.insight.waterfall import waterfall
from millrace.stages.recordings.film import Film, block_changes, film
from millrace.stages.recordings.reader import CacheReset, Recording, RecordingError, ScheduleCall
from millrace.stages.recordings.time_machine import Marks, TimeMachine
from millrace.stages.testing.scripted.engine import ScriptedPipeline
from tests.counts import FULL
from tests.stages.recorded_runs import record

pytestmark = pytest.mark.slow

DECIDED = (  # what schedule and allocate write themselves
    *(EventKind.STEP_PLANNED, EventKind.STEP_GRANTED, EventKind.WAITING_FOR, EventKind.REQUEST_ADMITTED),
    *(EventKind.ROW_EXTEND, EventKind.ROW_DECODE, EventKind.ROW_LEAVE, EventKind.PREEMPTED, EventKind.RESUMED),
    EventKind.KV_RANGE,
)


@pytest.fixture(scope="module")
def shot(tmp_path_factory: pytest.TempPathFactory) -> tuple[Film, ScriptedPipeline]:
    path = tmp_path_factory.mktemp("shot") / "run.jsonl"
    parts = record(path, 20, seed=3)
    return film(Recording(path)), parts


def told(records: Records, names: list[str], kind: EventKind) -> list[tuple[Any, ...]]:
    """The fields of records of a kind, names resolved, without times."""
    rows = []
    for row in records[records["kind"] == kind]:
        values = [int(row[name]) for name in ("step", "a", "b", "c", "d")]
        if kind in (EventKind.WAITING_FOR, EventKind.KV_RANGE, EventKind.PREEMPTED, EventKind.RESUMED):
            at = {EventKind.WAITING_FOR: 3, EventKind.KV_RANGE: 4}.get(kind, 2)
            values[at] = names[values[at]]  # type: ignore[call-overload]
        if kind is EventKind.REQUEST_ADMITTED:
            values[3] = 0  # its arrival, which is rounded in a recording
        rows.append(tuple(values))
    return rows


def test_the_trace_of_a_recording_says_what_the_engine_that_was_recorded_wrote(
    shot: tuple[Film, ScriptedPipeline],
) -> None:
    reel, parts = shot
    live, names = parts.pipeline.tracer.read_all(), parts.pipeline.tracer.names()
    assert {int(kind) for kind in DECIDED} <= {*reel.records["kind"].tolist()}
    for kind in DECIDED:
        assert told(reel.records, reel.names, kind) == told(live, names, kind), kind.name
    done = live[live["kind"] == EventKind.STEP_DONE]["step"].tolist()
    assert reel.of(EventKind.STEP_DONE)["step"].tolist() == done
    assert (np.diff(reel.records["time_ns"].astype(np.int64)) >= 0).all()


def test_requests_come_and_end_as_they_did(shot: tuple[Film, ScriptedPipeline]) -> None:
    reel, parts = shot
    live, names = parts.pipeline.tracer.read_all(), parts.pipeline.tracer.names()
    ended = {int(row["a"]): names[int(row["b"])] for row in live[live["kind"] == EventKind.REQUEST_FINISHED]}
    causes = {life.first_sequence_id: life.cause for life in reel.lives.values()}
    assert causes == ended and Counter(causes.values())["disconnect"] > 3
    admitted = {int(row["a"]): int(row["b"]) for row in live[live["kind"] == EventKind.REQUEST_ADMITTED]}
    for life in reel.lives.values():
        if life.began_s is not None and life.num_sequences == 1:
            assert life.num_cached_tokens == admitted[life.first_sequence_id]
        assert life.first_token_s is None or life.arrival_s <= life.first_token_s <= (life.ended_s or 0.0)


def test_tokens_and_their_times_are_those_of_the_steps(shot: tuple[Film, ScriptedPipeline]) -> None:
    """Counted again from the calls of the recording, by plain code."""
    reel, _ = shot
    count, last, gaps, over = Counter[int](), dict[int, float](), [], set[int]()
    for call in reel.recording:
        if isinstance(call, ScheduleCall):
            for message in call.taken:
                for sequence_id, is_finished in zip(
                    getattr(message, "sequence_ids", np.zeros(0)).tolist(),
                    getattr(message, "is_finished", np.zeros(0)).tolist(),
                    strict=True,
                ):
                    if sequence_id not in over:
                        if sequence_id in last:
                            gaps.append(int((call.time_s - last[sequence_id]) * 1e6))
                        count[sequence_id] += 1
                        last[sequence_id] = call.time_s
                    if is_finished:
                        over.add(sequence_id)
            over |= {sequence_id for sequence_id, cause in call.lane if cause not in ("park", "unpark")}
    for life in reel.lives.values():
        ids = range(life.first_sequence_id, life.first_sequence_id + life.num_sequences)
        assert life.num_generated_tokens == sum(count[each] for each in ids), life.request_id
    found = reel.latencies["inter_token_latency"].us
    assert len(found) == len(gaps) and np.allclose(np.sort(found), np.sort(gaps), atol=2)


def test_the_waterfall_of_a_recorded_request_has_no_hole(shot: tuple[Film, ScriptedPipeline]) -> None:
    reel, _ = shot
    view = TraceView(reel.records, reel.names)
    for life in reel.lives.values():
        fall = waterfall(view, life.first_sequence_id)
        assert fall is not None and fall.cause == life.cause
        assert sum(bar.ns for bar in fall.bars) == fall.end_ns - fall.begin_ns
        assert fall.end_ns == pytest.approx((life.ended_s or 0.0) * 1e9, abs=1e3)


def test_blocks_are_said_to_have_changed_when_they_did(shot: tuple[Film, ScriptedPipeline]) -> None:
    """Watched block by block: whatever is in another state than after the call before has changed in between."""
    reel, _ = shot
    when_ns, firsts, counts = block_changes(reel.records, reel.names)
    machine, before, before_ns, seen = reel.machine.another(), b"", 0, 0
    for call, _ in machine.calls():
        now_ns = round((reel.began_s + call.time_s) * 1e9)
        states = machine.core.allocate.allocator.pool.state.tobytes()
        if isinstance(call, CacheReset):
            continue  # blocks freed by it are recorded with the next plan
        for block in (i for i in range(len(before)) if before[i] != states[i]):
            hits = (firsts <= block) & (block < firsts + counts) & (when_ns <= now_ns)
            assert hits.any() and when_ns[hits].max() >= before_ns, (block, call.line)
            seen += 1
        before, before_ns = states, now_ns
    assert seen > 100


def test_going_back_to_a_mark_leads_to_where_one_was(shot: tuple[Film, ScriptedPipeline]) -> None:
    recording, dice = shot[0].recording, Random(4)
    marked = TimeMachine(recording, marks=Marks(recording.engine, spacing=8))
    times = list(marked.times())
    seen = {time_s: (marked.at(time_s), marked.replay.decision_hash) for time_s in sorted({*times})}
    assert len(marked.marks._places) > 5
    for time_s in dice.sample(list(seen), len(seen) if FULL else 12):
        assert (marked.at(time_s), marked.replay.decision_hash) == seen[time_s]
        assert marked.another().at(time_s) == seen[time_s][0]


def test_marks_stay_few_however_long_the_recording(shot: tuple[Film, ScriptedPipeline], monkeypatch: Any) -> None:
    monkeypatch.setattr("millrace.stages.recordings.time_machine.MAX_MARKS", 6)
    recording = Recording(shot[0].recording.path)
    machine = TimeMachine(recording, marks=Marks(recording.engine, spacing=2))
    machine.at(1e9)
    places = [place.num_calls for place in machine.marks._places]
    assert 3 <= len(places) <= 6 and places == sorted(places) and places[-1] > machine.replay.num_calls * 0.6


def test_a_recording_that_is_cut_off_is_shown_as_far_as_it_goes(
    shot: tuple[Film, ScriptedPipeline], tmp_path: Path
) -> None:
    whole = shot[0].recording.path.read_bytes()
    path = tmp_path / "cut.jsonl"
    path.write_bytes(whole[: len(whole) // 2])
    cut = film(Recording(path))
    assert cut.trouble is not None and "ended early" in cut.trouble
    assert 0 < cut.duration_s < shot[0].duration_s
    path.write_bytes(whole[:-30].replace(b'"num_free":5', b'"num_free":6'))
    changed = film(Recording(path))
    assert changed.trouble is not None and "decide differently now" in changed.trouble
    path.write_text("nothing\n")
    with pytest.raises(RecordingError):
        film(Recording(path))
