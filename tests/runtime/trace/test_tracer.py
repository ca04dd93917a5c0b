"""The trace: records, what a reader may rely on while the writer goes on, and derived tables."""

import mmap
import random
import re
import struct
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.trace import format as trace_format
from millrace.runtime.trace.format import NUM_BEGUN_AT, RECORD, RECORD_DTYPE, RECORDS_AT
from millrace.runtime.trace.step_rows import KEYFRAME_STEPS, LaneRows, StepRows
from millrace.runtime.trace.tracer import (
    FIELDS,
    EventKind,
    RingReader,
    Tracer,
    TraceRing,
    as_dicts,
    in_order_of_time,
    request_names,
    ring_bytes,
    token_times,
)


def filled(num_events: int, capacity_events: int = 8) -> TraceRing:
    ticks = iter(range(1_000_000))
    ring = TraceRing(capacity_events, now_ns=lambda: next(ticks))
    for i in range(num_events):
        ring.emit(EventKind.LOOP_LAG, 1, 0, i)
    return ring


def test_a_record_is_32_bytes_and_each_kind_has_a_number_and_one_to_four_fields():
    assert RECORD.size == RECORD_DTYPE.itemsize == 32 and RECORDS_AT % 32 == 0
    assert set(FIELDS) == set(EventKind) and len({int(kind) for kind in EventKind}) == len(EventKind)
    assert all(1 <= len(fields) <= 4 for fields in FIELDS.values())


def test_the_table_in_the_module_docstring_is_the_table_in_force():
    documented = {
        EventKind[row[0]]: tuple(row[1:])
        for line in (trace_format.__doc__ or "").splitlines()
        if line.startswith("    ") and (row := line.split())[0] in EventKind.__members__
    }
    if trace_format.__doc__ is not None:  # stripped under -OO
        assert documented == FIELDS


def test_numbers_of_kinds_never_change():
    assert {kind.name: int(kind) for kind in EventKind} == {
        **{"STAGE_BATCH": 1, "STAGE_RESTART": 2, "EDGE_DEPTH": 3, "STALL": 4, "STAGE_TIME": 5},
        **{"STEP_PLANNED": 16, "STEP_GRANTED": 17, "STEP_EXECUTED": 18, "STEP_SAMPLED": 19, "STEP_DONE": 20},
        **{"STEP_VOID": 21, "WAITING_FOR": 22, "ROW_EXTEND": 32, "ROW_DECODE": 33, "ROW_LEAVE": 34, "REQUEST_NAME": 48},
        **{"REQUEST_ACCEPTED": 49, "REQUEST_TOKENIZED": 50, "REQUEST_ADMITTED": 51, "FIRST_TOKEN": 52},
        **{
            "REQUEST_FINISHED": 53,
            "REQUEST_SHED": 54,
            "REQUEST_STAGE": 55,
            "REQUEST_GRAMMAR": 56,
            "REQUEST_ADAPTER": 57,
            "SET_ASIDE": 58,
            "PREEMPTED": 64,
            "RESUMED": 65,
            "PARKED": 66,
            "KV_RANGE": 67,
        },
        **{"KV_POOL": 68, "UNPARKED": 69, "LOOP_LAG": 80, "GC_PAUSE": 81, "STEP_DRAFTED": 23},
    }


def test_what_is_emitted_is_read_field_by_field():
    ring = TraceRing(8, now_ns=lambda: 123_456_789_012_345)
    ring.emit(EventKind.STEP_GRANTED, 3, 7, 256, 2_048, 255, 99)
    records, cursor, lost = RingReader(ring).read_since(0)
    assert records.tolist() == [(123_456_789_012_345, 17, 3, 7, 256, 2_048, 255, 99)] and (cursor, lost) == (1, 0)


@pytest.mark.parametrize(("num_events", "lost"), [(0, 0), (1, 0), (7, 0), (8, 1), (9, 2), (16, 9), (1_000, 993)])
def test_a_reader_gets_the_newest_records_and_the_number_it_missed(num_events: int, lost: int):
    records, cursor, num_lost = RingReader(filled(num_events)).read_since(0)
    assert records["a"].tolist() == list(range(lost, num_events)) and (cursor, num_lost) == (num_events, lost)


def test_reading_on_from_a_cursor_gives_each_record_once():
    ring = filled(0)
    reader, cursor, seen = RingReader(ring), 0, []
    for i in range(100):
        ring.emit(EventKind.LOOP_LAG, 1, 0, i)
        if i % 6 == 5:
            records, cursor, lost = reader.read_since(cursor)
            seen += records["a"].tolist()
            assert lost == 0
    assert seen == list(range(96))


def test_records_that_the_writer_has_begun_to_overwrite_are_reported_lost():
    ring = filled(20)
    struct.pack_into("<Q", ring.map, NUM_BEGUN_AT, 23)  # as within emit_many of three, before they are written
    records, cursor, lost = RingReader(ring).read_since(12)
    assert records["a"].tolist() == list(range(15, 20)) and (cursor, lost) == (20, 3)


def test_a_reader_beside_a_running_writer_sees_no_torn_record_and_accounts_for_all():
    ring = TraceRing(64)
    reader, cursor, num_seen, num_lost = RingReader(ring), 0, 0, 0

    def write() -> None:
        for i in range(5_000):
            ring.emit(EventKind.STEP_GRANTED, 1, i, i, i, i, i)

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive() or cursor < 5_000:
        records, cursor, lost = reader.read_since(cursor)
        assert all((records["step"] == records[column]).all() for column in "abcd")
        num_seen, num_lost = num_seen + len(records), num_lost + lost
    writer.join()
    assert num_seen + num_lost == 5_000 and num_seen > 0


@pytest.mark.parametrize("num_rows", [0, 1, 31, 32, 33, 39, 40, 41, 100])
def test_emit_many_writes_what_as_many_emits_would(num_rows: int):
    one, many = filled(5, capacity_events=40), filled(5, capacity_events=40)
    for i in range(num_rows):
        one.emit(EventKind.ROW_DECODE, 2, 9, i, i + 1, 3)
    many.emit_many(EventKind.ROW_DECODE, 2, 9, np.arange(num_rows), np.arange(num_rows) + 1, 3)
    (expected, *counts), (records, *counts_many) = RingReader(one).read_since(0), RingReader(many).read_since(0)
    fields = ["kind", "source", "step", *"abcd"]
    assert records[fields].tolist() == expected[fields].tolist() and counts == counts_many


def test_values_that_do_not_fit_are_clipped_and_numpy_integers_are_taken():
    ring = filled(0, capacity_events=64)
    ring.emit(EventKind.STAGE_BATCH, 1, np.int64(5), np.int32(6), -1, 2**40, 2.5)  # type: ignore[arg-type]
    ring.emit_many(EventKind.STAGE_BATCH, 1, 5, np.array([6]), -1, 2**40, 2)
    ring.emit_many(EventKind.STAGE_BATCH, 1, 5, np.full(40, 6), -1, np.full(40, 2**40), 2)
    records, _, _ = RingReader(ring).read_since(0)
    assert records[["step", *"abcd"]].tolist() == [(5, 6, 0, 2**32 - 1, 2)] * 42


def test_a_file_ring_is_read_by_others_and_after_the_writers_death(tmp_path: Path):
    tracer = Tracer(SimEnv(1), directory=tmp_path, capacity_events=8)
    tracer.emit(EventKind.LOOP_LAG, tracer.source("loop"), 0, 7)
    late = tracer.source("schedule")
    (path,) = tmp_path.iterdir()
    reader = RingReader(path)
    del tracer
    records, _, _ = reader.read_since()
    assert records["a"].tolist() == [7] and reader.names() == ["", "loop", "schedule"] and late == 2
    header = reader.header()
    assert header["base_monotonic_ns"] == 1_000 * 10**9 and header["base_wall_ns"] == 1_700_000_000 * 10**9
    assert header["thread"].rstrip(b"\0") == b"MainThread" and header["capacity_events"] == 8


def test_a_ring_of_a_dead_process_is_read_in_our_names_and_continued():
    with tempfile.TemporaryFile() as file:
        file.truncate(ring_bytes(8))
        ours = Tracer(capacity_events=8)
        ours.source("only ours")
        ours.emit(EventKind.LOOP_LAG, ours.source("loop"), 0, 1)
        ours.adopt(mmap.mmap(file.fileno(), 0))
        assert len(ours.readers()) == 1, "nothing was written there yet"

        theirs = Tracer(capacity_events=8, files=[file.fileno()])
        theirs.emit(EventKind.STAGE_RESTART, theirs.source("schedule"), 0, 2, theirs.source("Error"))
        theirs.emit(EventKind.LOOP_LAG, theirs.source("loop"), 0, 3)
        after = Tracer(capacity_events=8, files=[file.fileno()])
        after.emit(EventKind.PREEMPTED, after.source("allocate"), 5, 7, after.source("swap"))
        assert after.names() == [*theirs.names(), "allocate", "swap"]

        told = [(event["kind"], event["source"]) for event in as_dicts(ours.read_all(), ours.names())]
        assert told == [
            ("LOOP_LAG", "loop"),
            ("STAGE_RESTART", "schedule"),
            ("LOOP_LAG", "loop"),
            ("PREEMPTED", "allocate"),
        ]
        events = list(as_dicts(ours.read_all(), ours.names()))
        assert events[1]["error_name"] == "Error" and events[3]["how_name"] == "swap" and events[3]["slot"] == 7
        own, adopted = ours.readers()
        assert own.header()["num_written"] == 1 and adopted.header()["num_written"] == 3
        assert adopted.names() == ours.names()


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [(0, b"GGUF", "magic b'GGUF"), (8, b"\7", "version 7"), (12, b"\60", "record size 48"), (16, b"\77", "63 records")],
)
def test_a_file_that_is_no_ring_is_refused_by_what_is_wrong(tmp_path: Path, at: int, value: bytes, message: str):
    path = tmp_path / "ring"
    ring = TraceRing(8, path)
    ring.map[at : at + len(value)] = value
    with pytest.raises(ValueError, match=re.escape(message)):
        RingReader(path)
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="5 bytes: too short for a trace ring"):
        RingReader(path)


def test_each_thread_writes_its_own_ring_and_all_are_read_in_order_of_time():
    tracer = Tracer(capacity_events=64)
    stage = tracer.source("stage")

    def write(first: int) -> None:
        for i in range(first, first + 10):
            tracer.emit(EventKind.LOOP_LAG, stage, 0, i)

    threads = [threading.Thread(target=write, args=(first,), name=f"t{first}") for first in (0, 100)]
    for thread in threads:
        thread.start()
        thread.join()
    write(200)
    readers = tracer.readers()
    assert [reader.header()["thread"].rstrip(b"\0") for reader in readers] == [b"t0", b"t100", b"MainThread"]
    records = tracer.read_all()
    assert len(records) == 30 and (np.diff(records["time_ns"].astype(np.int64)) >= 0).all()
    assert in_order_of_time([]).tolist() == []


def test_names_are_given_once_and_a_full_or_long_name_is_no_error():
    tracer = Tracer()
    tracer.emit(EventKind.LOOP_LAG, tracer.source("first"))
    assert tracer.source("first") == tracer.source("first") == 1
    assert tracer.source("é" * 60) == 2 and tracer.readers()[0].names() == ["", "first", "é" * 31]
    ids = [tracer.source(f"name-{i}") for i in range(2_000)]
    assert ids[0] == 3 and ids[-1] == 0 and max(ids) == 1_023


def test_a_tracer_switched_off_writes_nothing_and_may_be_switched_on():
    tracer = Tracer(enabled=False)
    tracer.emit(EventKind.LOOP_LAG, 0)
    tracer.emit_many(EventKind.LOOP_LAG, 0, 0, np.arange(3))
    tracer.emit_request_name(0, 1, "r")
    assert tracer.readers() == []
    tracer.enabled = True
    tracer.emit(EventKind.LOOP_LAG, 0)
    assert len(tracer.read_all()) == 1


def test_a_strict_tracer_refuses_a_record_that_its_fields_do_not_describe():
    tracer = Tracer(strict=True)
    stage = tracer.source("stage")
    tracer.emit(EventKind.STEP_VOID, stage, 1, 2, stage)
    for values, message in (
        ((EventKind.LOOP_LAG, stage, 0, 1, 2), "LOOP_LAG has the fields lag_us, and got"),
        ((EventKind.LOOP_LAG, 9), "source 9 is not the id of a name"),
        ((EventKind.STEP_VOID, stage, 0, 1, 9), "reason_name = 9 is not the id of a name"),
        ((EventKind.LOOP_LAG, stage, 0, 2**32), "lag_us = 4294967296 does not fit"),
        ((EventKind.LOOP_LAG, stage, -1), "step = -1 does not fit"),
    ):
        with pytest.raises(ValueError, match=message):
            tracer.emit(*values)
    assert len(tracer.read_all()) == 1


def test_records_read_as_named_fields_with_names_resolved():
    tracer = Tracer(SimEnv(1))
    allocate, swap = tracer.source("allocate"), tracer.source("swap")
    tracer.emit(EventKind.PREEMPTED, allocate, 12, 5, swap, 40, 640)
    assert list(as_dicts(tracer.read_all(), tracer.readers()[0].names())) == [
        {"time_ns": 10**12, "kind": "PREEMPTED", "source": "allocate", "step": 12}
        | {"slot": 5, "how_name": "swap", "num_blocks": 40, "num_tokens": 640}
    ]


@pytest.mark.parametrize("request_id", ["r", "twelve-bytes", "thirteen-bytes", "chatcmpl-é-0123456789abcdef0123456789"])
def test_a_sequence_is_tied_to_the_name_of_its_request(request_id: str):
    tracer = Tracer()
    tracer.emit_request_name(0, 7, request_id)
    tracer.emit_request_name(0, 8, "other")
    assert request_names(tracer.read_all()) == {7: request_id, 8: "other"}


class Steps:
    """Emits steps as schedule and sample would, on a clock of one tick a record."""

    def __init__(self) -> None:
        self.env = SimEnv(1)
        self.tracer = Tracer(self.env)
        self.rows = StepRows(self.tracer, 0, num_slots=8)
        self.expected: dict[int, list[int]] = {}

    def step(
        self, step: int, *rows: tuple[int, int, int, int], gives: tuple[int, ...] = (), is_void: bool = False
    ) -> None:
        columns = np.array(rows, np.int64).reshape(-1, 4)
        self.rows.step(step, columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3])
        self.tracer.emit(EventKind.STEP_VOID if is_void else EventKind.STEP_DONE, 0, step, len(rows))
        for sequence_id in gives:
            self.expected.setdefault(sequence_id, []).append(step)

    def derived(self) -> dict[int, list[int]]:
        times = token_times(self.tracer.read_all())
        return {sequence_id: [step for step, _ in tokens] for sequence_id, tokens in times.items() if tokens}


def test_the_token_timeline_follows_from_changes_of_membership_alone():
    steps = Steps()  # rows are (slot, sequence, start, tokens)
    steps.step(1, (0, 70, 0, 16))
    steps.step(2, (0, 70, 16, 4), (1, 71, 0, 9), gives=(70, 71))  # both prompts are complete
    steps.step(3, (0, 70, 20, 1), (1, 71, 9, 1), gives=(70, 71))
    steps.step(4, (0, 70, 21, 1), (1, 71, 10, 1), is_void=True)
    steps.step(5, (0, 70, 21, 1), (1, 71, 10, 1), gives=(70, 71))
    steps.step(6, (1, 71, 11, 1), gives=(71,))  # 70 is preempted
    steps.step(7, (0, 72, 0, 1), (1, 71, 12, 1), gives=(71, 72))  # a prompt of one token, in the slot that 70 had
    steps.step(8, (0, 72, 1, 1), (2, 70, 0, 22), gives=(72, 70))  # 71 has ended; 70 is computed again
    steps.step(9, (0, 72, 2, 1), (2, 70, 22, 1), gives=(72, 70))
    steps.step(10)
    assert steps.derived() == steps.expected


def test_the_token_timeline_of_one_engine_process_has_no_steps_of_another():
    steps, others, other = Steps(), Steps(), 1 << 31  # its steps begin there
    others.tracer, others.rows = steps.tracer, StepRows(steps.tracer, 0, num_slots=8)
    steps.step(1, (0, 70, 0, 16), gives=(70,))
    others.step(other, (1, 71, 0, 16), gives=(71,))
    steps.step(2, (0, 70, 16, 1), gives=(70,))
    others.step(other + 1, (1, 71, 16, 1), gives=(71,))
    steps.step(3, (0, 70, 17, 1), gives=(70,))
    assert steps.derived() == steps.expected | others.expected


def test_steady_decoding_writes_no_row_and_a_change_writes_only_itself():
    steps = Steps()
    for step in range(1, 50):
        steps.step(step, *((slot, 100 + slot, step, 1) for slot in range(6)))
    kinds = steps.tracer.read_all()["kind"].tolist()
    assert kinds.count(EventKind.ROW_DECODE) == 6 and len(kinds) == 49 + 6
    steps.step(50, *((slot, 100 + slot, 50, 1) for slot in range(5)))
    assert steps.tracer.read_all()["kind"].tolist()[-2:] == [EventKind.ROW_LEAVE, EventKind.STEP_DONE]


def test_lanes_that_take_turns_give_each_row_the_tokens_of_its_own_steps():
    steps, exact = Steps(), Steps()
    rows = LaneRows(steps.tracer, 0, 8, num_lanes=2)
    lanes = [np.array([0, 1, 2]), np.array([3, 4])]
    rows.step(1, np.arange(5), 70 + np.arange(5), np.zeros(5, np.int64), np.full(5, 9))
    exact.step(1, *((slot, 70 + slot, 0, 9) for slot in range(5)), gives=tuple(range(70, 75)))
    steps.tracer.emit(EventKind.STEP_DONE, 0, 1, 5)
    num_short = 0
    for step in range(2, 800):
        slots = np.arange(5) if step == 300 else lanes[step % 2]
        starts, ones = np.full(len(slots), 9 + step), np.ones(len(slots), np.int64)
        is_short = rows.go_on(step, slots, starts)
        num_short += is_short
        if not is_short:
            rows.step(step, slots, 70 + slots, starts, ones)
        steps.tracer.emit(EventKind.STEP_DONE, 0, step, len(slots))
        columns = [(slot, 70 + slot, 9 + step, 1) for slot in slots.tolist()]
        exact.step(step, *columns, gives=tuple((70 + slots).tolist()))
    assert num_short > 750 and steps.derived() == exact.derived() == exact.expected
    kinds = steps.tracer.read_all()["kind"]
    assert np.count_nonzero(kinds == EventKind.ROW_DECODE) <= 5 * (3 + 800 // KEYFRAME_STEPS)


@pytest.mark.parametrize("seed", range(6))
def test_rows_in_lanes_that_come_go_and_miss_turns_have_the_tokens_of_their_steps(seed: int):
    """Random lives, told to rows in lanes and, row by row, to those of one lane."""
    dice, steps, exact = random.Random(seed), Steps(), Steps()
    num_lanes = dice.randint(2, 4)
    rows = LaneRows(steps.tracer, 0, 8, num_lanes)
    sequence_in = {slot: 70 + slot for slot in range(dice.randint(1, 8))}
    lanes: list[np.ndarray] = []
    for step in range(1, 700):
        if dice.random() < 0.05 or not lanes:  # rows come, go, and are dealt anew
            for slot in dice.sample(range(8), 2):
                sequence_in[slot] = 70 + 8 * step + slot
            if dice.random() < 0.5 and len(sequence_in) > 1:
                sequence_in.pop(dice.choice(list(sequence_in)))
            slots = np.array(dice.sample(list(sequence_in), len(sequence_in)))
            lanes = [lane for lane in np.array_split(slots, num_lanes) if len(lane)]
        chosen, extends = lanes[step % len(lanes)], dice.random() < 0.05
        if dice.random() < 0.05:
            chosen = dice.choice(lanes)
        ids = np.array([sequence_in[slot] for slot in chosen.tolist()])
        starts, counts = np.full(len(ids), step), np.ones(len(ids), np.int64)
        counts[: 1 + len(ids) // 2] += 3 * extends
        if extends or not rows.go_on(step, chosen, starts):
            rows.step(step, chosen, ids, starts, counts)
        is_void = dice.random() < 0.03
        steps.tracer.emit(EventKind.STEP_VOID if is_void else EventKind.STEP_DONE, 0, step, len(ids))
        columns = zip(chosen.tolist(), ids.tolist(), starts.tolist(), counts.tolist(), strict=True)
        exact.step(step, *columns, is_void=is_void)
    assert steps.derived() == exact.derived()


def test_a_slot_taken_by_another_sequence_is_noticed_if_the_number_of_rows_stays():
    steps = Steps()
    steps.step(1, (0, 70, 5, 1), (1, 71, 5, 1), gives=(70, 71))
    steps.step(2, (0, 70, 6, 1), (2, 72, 5, 1), gives=(70, 72))
    steps.step(3, (0, 73, 5, 1), (2, 72, 6, 1), gives=(73, 72))
    steps.step(4)
    assert steps.derived() == steps.expected


def test_rows_are_rewritten_at_intervals_so_an_overwritten_ring_can_be_read():
    steps = Steps()
    for step in range(KEYFRAME_STEPS - 3, KEYFRAME_STEPS + 3):
        steps.step(step, (0, 70, step, 1), gives=(70,))
    assert steps.derived() == steps.expected
    records = steps.tracer.read_all()
    later = records[records["step"] >= KEYFRAME_STEPS]
    assert [step for step, _ in token_times(later)[70]] == [KEYFRAME_STEPS, KEYFRAME_STEPS + 1, KEYFRAME_STEPS + 2]
