"""Device slots of adapters: random histories of a small scheduler around the plain code, and cases by hand."""

from __future__ import annotations

import random
from collections import deque

import numpy as np

from millrace.stages.params import SamplingParams
from millrace.stages.schedule.adapter_lines import MAX_PASSES, AdapterLines
from millrace.stages.schedule.adapter_slots import AdapterSlots, AdapterState
from millrace.stages.schedule.pass_counts import PassCounts
from millrace.stages.schedule.scheduler import StepLimits
from millrace.stages.schedule.sequence import Sequence, WaitingQueue
from millrace.stages.schedule.stage import Schedule
from tests.counts import count, first_seed

NUM_ROWS, K = 6, 2


def sequence_of(number: int, adapter: str, num_tokens: int = 1) -> Sequence:
    return Sequence(
        number, f"r{number}", np.zeros(1, np.int32), 1, 1 + num_tokens, SamplingParams(), 0, 0, adapter=adapter
    )


class SmallScheduler:
    """Rows of a token each, K steps in flight, and a device that reads the adapter of each row when its step ends."""

    def __init__(self, num_adapter_slots: int, num_rows: int = NUM_ROWS) -> None:
        self.lines = AdapterLines(AdapterSlots(num_adapter_slots))
        self.slots = self.lines.slots
        self.num_rows = num_rows
        self.waiting = WaitingQueue()
        self.running: dict[int, tuple[Sequence, int]] = {}  # sequence id -> (sequence, its last step)
        self.left: dict[int, int] = {}  # sequence id -> tokens
        self.flights: deque[tuple[int, list[Sequence], tuple[tuple[int, str], ...]]] = deque()
        self.device: dict[int, str] = {}
        self.last_granted = self.completed = -1
        self.starts: list[int] = []  # sequence ids, in order

    def add(self, sequence: Sequence) -> None:
        self.left[sequence.sequence_id] = sequence.limit - 1
        self.waiting.push(sequence, (sequence.sequence_id,))

    def num_left(self) -> dict[int, int]:
        sums: dict[int, int] = {}
        for sequence, _ in self.running.values():
            sums[sequence.adapter_slot] = sums.get(sequence.adapter_slot, 0) + self.left[sequence.sequence_id]
        return sums

    def plan(self, *, is_void: bool = False) -> None:
        if len(self.flights) == K:
            return
        if self.lines.needs_advance:
            for digest in self.lines.advance(self.completed, self.last_granted, self.num_left):
                for sequence in self.lines.take(digest):
                    self.waiting.push(sequence, (sequence.sequence_id,))
        while len(self.running) < self.num_rows and (first := self.waiting.peek()) is not None:
            self.waiting.pop()
            if first.adapter and not self.slots.may_join(first.adapter):
                self.lines.add(first, (first.sequence_id,))
                continue
            if self.lines.holds_back(first, (first.sequence_id,)):
                self.waiting.push(first, (first.sequence_id,))
                break
            self.lines.join(first, (first.sequence_id,))
            self.running[first.sequence_id] = (first, -1)
            self.starts.append(first.sequence_id)
        loads, step = self.slots.loads(), self.last_granted + 1
        rows = [sequence for sequence, _ in self.running.values()]
        for sequence in rows:
            self.running[sequence.sequence_id] = (sequence, step)
        if is_void or not (rows or loads):
            return
        for number, _ in loads:
            read = {sequence.adapter_slot for _, flown, _ in self.flights for sequence in flown}
            assert number not in read | {sequence.adapter_slot for sequence in rows}, "a step may still read the slot"
        self.slots.note_granted(loads, step)
        self.last_granted = step
        self.flights.append((step, rows, loads))

    def done(self, *, is_void: bool = False, fails: bool = False) -> None:
        if not self.flights:
            return
        step, rows, loads = self.flights.popleft()
        self.completed = step
        if is_void:
            return self.lines.note_void(step)
        self.device.update({number: "broken" if fails else digest for number, digest in loads})
        for sequence in self.lines.note_done(step, [digest for _, digest in loads] if fails else []):
            self.end(sequence)
        for sequence in rows:
            assert self.device.get(sequence.adapter_slot, "") == sequence.adapter, "a row read another adapter"
            if sequence.sequence_id in self.running:
                self.left[sequence.sequence_id] -= 1
                if self.left[sequence.sequence_id] <= 0:
                    self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        ran = self.running.pop(sequence.sequence_id, None)
        if ran is not None:
            if sequence.adapter:
                self.slots.leave(sequence.adapter_slot, ran[1])
        elif not self.lines.remove(sequence):
            self.waiting.remove(sequence)
            self.slots.forget(sequence.adapter, sequence.sequence_id)
        del self.left[sequence.sequence_id]

    def kept(self) -> set[str]:
        """The resident adapters that are pinned."""
        resident = {slot.digest for slot in self.slots.slots if slot.state is AdapterState.RESIDENT}
        return resident & self.slots.pinned

    def check(self) -> None:
        self.slots.check()
        num_lines = len(self.lines)
        assert len(self.running) + len(self.waiting) + num_lines == len(self.left), "a sequence is lost"


def run_history(seed: int) -> None:
    draw = random.Random(seed)
    scheduler = SmallScheduler(draw.randint(1, 4), draw.randint(1, NUM_ROWS))
    adapters = ["", *(f"digest-{i}" for i in range(draw.randint(1, 7)))]
    alive: dict[int, Sequence] = {}
    for number in range(draw.randint(20, 120)):
        chance, kept = draw.random(), scheduler.kept()
        if draw.random() < 0.03:
            scheduler.slots.pin(draw.sample(adapters[1:], draw.randint(0, len(adapters) - 1)))
            kept &= scheduler.kept()
        if chance < 0.4:
            alive[number] = sequence_of(number, draw.choice(adapters), draw.choice((1, 2, 9)))
            scheduler.add(alive[number])
        elif chance < 0.7:
            scheduler.plan(is_void=draw.random() < 0.1)
        elif chance < 0.95:
            scheduler.done(is_void=draw.random() < 0.1, fails=draw.random() < 0.1)
        else:
            present = [sequence for key, sequence in alive.items() if key in scheduler.left]
            if present:
                scheduler.end(draw.choice(present))
        scheduler.check()
        assert kept <= scheduler.kept(), f"seed {seed}: a pinned adapter has lost its slot"
    for _ in range(12 * len(alive) + 20):  # each has at most nine tokens, and a load takes a step or two
        scheduler.plan()
        scheduler.done()
    assert not scheduler.left, f"seed {seed}: {len(scheduler.left)} sequences never ran"
    scheduler.check()


def test_no_slot_is_overwritten_while_a_step_may_read_it_and_all_run() -> None:
    first = first_seed()
    for seed in range(first, first + count(100, 100_000)):
        run_history(seed)


def test_a_pinned_adapter_keeps_its_slot_while_others_share_one_without_end() -> None:
    scheduler, number = SmallScheduler(2), 0
    scheduler.slots.pin(["a", "b", "c"])
    assert scheduler.slots.pinned == {"a"}, "one slot is for all others"
    for _ in range(40):
        for adapter in ("a", "b", "c"):
            scheduler.add(sequence_of(number, adapter))
            number += 1
        for _ in range(12):
            scheduler.plan()
            scheduler.done()
        assert not scheduler.left
    assert scheduler.slots.of("a") is not None and scheduler.slots.num_loads > 40
    scheduler.slots.pin([])
    for adapter in ("b", "c"):
        scheduler.add(sequence_of(number, adapter))
        number += 1
        for _ in range(12):
            scheduler.plan()
            scheduler.done()
    assert scheduler.slots.of("a") is None


def test_a_load_that_fails_ends_its_line_and_the_next_line_gets_the_slot() -> None:
    scheduler = SmallScheduler(1)
    for number, adapter in enumerate(("bad", "", "bad", "good")):
        scheduler.add(sequence_of(number, adapter, 3))
    scheduler.plan()
    scheduler.plan()
    assert scheduler.slots.of("bad") is not None and scheduler.starts == [1]
    scheduler.done()
    scheduler.done(fails=True)
    assert scheduler.slots.of("bad") is None and not {0, 2} & set(scheduler.left)
    scheduler.plan()
    assert scheduler.slots.slots[0].digest == "good"
    for _ in range(9):
        scheduler.plan()
        scheduler.done()
    assert scheduler.starts == [1, 3] and not scheduler.left
    scheduler.check()


def test_a_void_load_is_planned_again_only_while_a_sequence_waits_for_it() -> None:
    scheduler = SmallScheduler(2)
    first, second = sequence_of(0, "a"), sequence_of(1, "b")
    scheduler.add(first)
    scheduler.add(second)
    scheduler.plan()
    scheduler.plan()
    scheduler.end(first)
    scheduler.done(is_void=True)
    assert scheduler.slots.of("a") is None and scheduler.slots.loads() == ((2, "b"),)
    scheduler.check()


def test_a_waiting_sequence_is_passed_fifty_times_and_then_a_slot_drains_for_it() -> None:
    scheduler = SmallScheduler(1, num_rows=2)
    for number in range(200):
        scheduler.add(sequence_of(number, "other" if number == 2 else "busy", 3 if number else 2))
    for _ in range(400):
        scheduler.plan()
        scheduler.done()
    behind = [number for number in scheduler.starts[: scheduler.starts.index(2)] if number > 2]
    assert MAX_PASSES - 2 <= len(behind) <= MAX_PASSES + 2, "fifty, the rows of a step more or less"
    assert sorted(scheduler.starts) == list(range(200))


def test_slots_drain_for_the_owed_in_their_order_and_the_rest_hold_back_those_behind() -> None:
    lines = AdapterLines(AdapterSlots(2))
    slots = lines.slots
    for slot, digest in zip(slots.slots, "ab", strict=True):
        slots.load(slot, digest)
    slots.note_granted(slots.loads(), 0)
    slots.note_done(0)
    for number, digest in enumerate("ab"):
        lines.join(sequence_of(number, digest), (number,))
    for number, digest in enumerate("xyz", 10):
        lines.add(sequence_of(number, digest), (number,))
    for number in range(100, 100 + MAX_PASSES):
        assert not lines.holds_back(sequence_of(number, ""), (number,))
        lines.join(sequence_of(number, ""), (number,))
    assert lines.holds_back(sequence_of(200, ""), (200,)) and not lines.holds_back(sequence_of(9, ""), (9,))
    assert lines.advance(0, 0, lambda: {1: 30, 2: 10}) == []
    assert [slot.state for slot in slots.slots] == 2 * [AdapterState.DRAINING] and lines.drained_for == ["x", "y"]
    assert lines.holds_back(sequence_of(13, ""), (13,)), "it would pass z, for which no slot is left"
    assert not lines.holds_back(sequence_of(11, ""), (11,)), "it passes x, for which one drains"
    slots.leave(2, 5)
    lines.advance(4, 5, dict)
    assert slots.of("x") is None, "step 5 is in flight and may read slot 2"
    lines.advance(5, 5, dict)
    assert slots.of("x") is slots.slots[1] and lines.drained_for == ["y"]


def test_a_sequence_that_joins_ahead_takes_over_the_count_of_those_behind_it() -> None:
    passes = PassCounts()
    late, early, better = (sequence_of(number, "a") for number in (5, 3, 1))
    passes.add(late, ((5,), 5))
    for number in (4, 6, 7):
        passes.note_admitted(((number,), number))
    passes.add(early, ((3,), 3))
    passes.note_admitted(((4,), 4))
    assert [passes.num_past(most) for most in (2, 3, 4)] == [2, 1, 0]
    passes.remove(((3,), 3))
    assert early.num_passes == 3
    better.num_passes = 9
    passes.add(better, ((1,), 1))
    passes.add(early, ((3,), 3))
    assert [key for key, _ in passes.most_passed(3)] == [((1,), 1), ((3,), 3)]


def test_an_idle_slot_is_taken_by_rank_and_no_adapter_whose_line_was_told() -> None:
    lines = AdapterLines(AdapterSlots(1))
    lines.add(sequence_of(2, "b"), (2,))
    lines.add(sequence_of(1, "a"), (1,))
    lines.advance(-1, -1, dict)
    lines.slots.note_granted(lines.slots.loads(), 0)
    lines.slots.note_done(0)
    assert lines.advance(0, 0, dict) == ["a"]
    assert [sequence.sequence_id for sequence in lines.take("a")] == [1]
    lines.advance(0, 0, dict)
    assert lines.slots.may_join("a"), "idle, but sequence 1 is about to run"
    lines.slots.forget("a", 1)
    lines.advance(0, 0, dict)
    assert lines.slots.of("b") is lines.slots.slots[0], "sequence 1 has gone"


def test_a_drain_ends_when_nobody_waits_for_it_any_more() -> None:
    scheduler = SmallScheduler(1, num_rows=1)
    scheduler.add(sequence_of(0, "a", 500))
    for _ in range(3):
        scheduler.plan()
        scheduler.done()
    other = sequence_of(1, "b")
    scheduler.add(other)
    scheduler.waiting.pop()
    other.num_passes = MAX_PASSES
    scheduler.lines.add(other, (1,))
    scheduler.plan()
    assert scheduler.slots.num_draining == 1
    scheduler.end(other)
    scheduler.plan()
    assert scheduler.slots.may_join("a")


def test_sequences_set_aside_do_not_keep_others_in_the_channel() -> None:
    schedule = Schedule(StepLimits(4, 16, 64, 4, max_loras=1), max_waiting=1)
    scheduler = schedule.scheduler
    assert scheduler.adapters is not None
    for number in range(3):
        scheduler.adapters.add(sequence_of(number, "a"), (number,))
    assert scheduler.num_waiting == 3 and schedule.wants("in")
    scheduler.waiting.push(sequence_of(9, ""), (9,))
    assert not schedule.wants("in")
