"""Random plans of the kinds that the real scheduler makes: lists and dicts, no policy, no columns.

Drives the allocator in `tests/stages/allocate/allocator_machine.py`. It uses the scheduler's terms for sequences and
steps, and knows neither blocks nor the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from millrace.stages.messages import PlanReport, Started, StepDone, StepPlan
from millrace.stages.params import SamplingParams
from tests.stages.allocate.naive_memory import Text

STEPS_IN_FLIGHT = 2
PARAMS = SamplingParams()


@dataclass(eq=False)
class Seq:
    """The scheduler's state of a sequence; see `schedule/sequence.py`."""

    text: Text
    num_prompt: int
    limit: int
    priority: int
    state: str = "waiting"  # running, returning, over
    slot: int = -1
    num_known: int = 0
    num_computed: int = 0
    num_on_host: int = 0
    swapped_step: int = -1
    last_step: int = -1
    num_preempted: int = 0
    is_finished: bool = False  # on the device, which returns no more tokens of it
    has_drafts: bool = False  # in a step in flight, so that its number of tokens is not known

    @property
    def sequence_id(self) -> int:
        return self.text.sequence_id

    @property
    def rank(self) -> tuple[int, bool, int]:
        return self.priority, not self.num_on_host, self.sequence_id


@dataclass
class _News:
    """Updates for allocate, sent with the next plan."""

    ended: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    discarded: list[int] = field(default_factory=list)
    settled: list[StepDone] = field(default_factory=list)
    voided: list[int] = field(default_factory=list)

    @property
    def is_urgent(self) -> bool:
        return bool(self.ended or self.preempted or self.dropped or self.discarded)


class NaiveScheduler:
    """Takes events and makes plans: one at a time, and the next one after `hear` has taken the report."""

    def __init__(self, num_slots: int, max_model_len: int, *, allows_partial: bool, protects_after: int) -> None:
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.allows_partial = allows_partial
        self.protects_after = protects_after  # preemptions
        self.sequences: dict[int, Seq] = {}  # not over
        self.holders: dict[int, Seq] = {}  # slot -> its sequence
        self.last_granted = self.completed_step = -1
        self.generation = 0
        self.outstanding: StepPlan | None = None
        self._leaving: list[tuple[int, int]] = []  # (last step that may use the slot, slot)
        self._told_step = -1
        self._news = _News()
        self._must_wait = False
        self._num_quarantined = 0

    @property
    def num_in_flight(self) -> int:
        return self.last_granted - self.completed_step

    @property
    def may_plan(self) -> bool:
        """Whether there is a credit, and a reason to think that the next plan runs something."""
        return not self._must_wait and self.num_in_flight < STEPS_IN_FLIGHT

    # -- planning

    def plan(self, *, moves: int, admitted: int, row_limit: int, spare_budget: int) -> StepPlan | None:
        """The next plan: after up to `moves` slots are taken and `admitted` given away, of up to `row_limit` rows. None
        if there is nothing to say."""
        assert self.may_plan and self.outstanding is None
        self._settle()
        self._make_way(moves)
        started = self._admit(admitted)
        self.outstanding = self._make_plan(started, row_limit, spare_budget)
        assert self.outstanding is not None or not started
        return self.outstanding

    def _settle(self) -> None:
        leaving, self._leaving = self._leaving, []
        for last_step, slot in leaving:
            if min(last_step, self.last_granted) > self.completed_step:
                self._leaving.append((last_step, slot))
                continue
            seq = self.holders.pop(slot)
            seq.slot = -1
            if seq.state == "returning":
                seq.state = "waiting"

    def _waiting(self) -> list[Seq]:
        return sorted((s for s in self.sequences.values() if s.state == "waiting"), key=lambda seq: seq.rank)

    def _running(self) -> list[Seq]:
        running = [seq for seq in self.holders.values() if seq.state == "running"]
        return sorted(running, key=lambda seq: (seq.priority, seq.sequence_id))

    def _is_protected(self, seq: Seq) -> bool:
        return seq.num_preempted >= self.protects_after

    def _make_way(self, moves: int) -> None:
        """Up to `moves` running sequences lose their slots to strictly better ones that wait."""
        if len(self.holders) < self.num_slots:
            return
        better = [seq.priority for seq in self._waiting()][len(self._leaving) :][:moves]
        for seq in reversed(self._running()):
            if not better or better[0] >= seq.priority:
                return
            if not self._is_protected(seq):
                del better[0]
                self._news.preempted.append(seq.slot)
                self._note_preempted(seq)

    def _admit(self, most: int) -> list[Seq]:
        if any(seq.state == "returning" for seq in self.sequences.values()):
            return []
        free = [slot for slot in range(self.num_slots) if slot not in self.holders]
        admitted = self._waiting()[:most]
        for slot, seq in zip(free, admitted, strict=False):
            seq.state, seq.slot, seq.last_step = "running", slot, -1
            seq.num_known, seq.num_computed = len(seq.text.tokens), 0
            self.holders[slot] = seq
        return admitted[: len(free)]

    def _make_plan(self, started: list[Seq], row_limit: int, spare_budget: int) -> StepPlan | None:
        order = self._running()
        runnable = [seq for seq in order if seq.num_known < seq.limit and not seq.has_drafts]
        decodes = [seq for seq in runnable if seq.num_known - seq.num_computed == 1]
        rows = [*decodes, *(seq for seq in runnable if seq not in decodes)][:row_limit]
        is_settling = self._num_quarantined > 0 and self.completed_step > self._told_step
        if not rows and not self._news.is_urgent and not is_settling:
            return None
        is_victim = [place > 0 and not self._is_protected(seq) for place, seq in enumerate(order)]
        behind = {seq.slot: sum(is_victim[place + 1 :]) for place, seq in enumerate(order)}
        reserved = [seq.limit if self._is_protected(seq) else 0 for seq in rows]
        has_reserves = any(self._is_protected(seq) for seq in order)
        updates, self._news = self._news, _News()
        self._told_step = self.completed_step
        return StepPlan(
            step=self.last_granted + 1,
            generation=self.generation,
            completed_step=self.completed_step,
            slots=np.array([seq.slot for seq in rows], np.intp),
            num_wanted=np.array([seq.num_known - seq.num_computed for seq in rows], np.int32),
            reaches_end=np.ones(len(rows), np.bool_),
            token_budget=self.num_slots + spare_budget if self.allows_partial else self.max_model_len + spare_budget,
            victims=np.array([s.slot for s, v in zip(order, is_victim, strict=True) if v][::-1], np.intp),
            num_victims=np.array([behind[seq.slot] for seq in rows], np.int32),
            num_reserved=np.array(reserved, np.int32) if has_reserves else None,
            is_decode=0 < len(order) == len(decodes) <= row_limit,
            allows_partial=self.allows_partial,
            started=tuple(_started(seq) for seq in started),
            ended=updates.ended,
            preempted=updates.preempted,
            dropped=updates.dropped,
            discarded=updates.discarded,
            settled=updates.settled,
            voided=updates.voided,
        )

    # -- events

    def add(self, seq: Seq) -> None:
        """A sequence arrives."""
        self.sequences[seq.sequence_id] = seq

    def end(self, sequence_id: int) -> None:
        """Ends a sequence in any state. Ignores unknown ids, which have ended."""
        seq = self.sequences.pop(sequence_id, None)
        if seq is None:
            return
        self._discard(seq)
        before, seq.state = seq.state, "over"
        if before == "running":
            self._leave(seq)
            self._news.ended.append(seq.slot)

    def hear(self, report: PlanReport) -> None:
        """Takes the report on the outstanding plan."""
        plan, self.outstanding = self.outstanding, None
        assert plan is not None
        self._num_quarantined = report.num_quarantined + report.num_host_quarantined
        if report.is_reset:
            self._take_back(list(self.holders.values()), tell=False)
            return self._give_up_swapped(-1)
        if report.is_void:
            self._must_wait = len(plan.slots) > 0 and self.num_in_flight > 0
        else:
            self._note_grant(plan, report)
        for slot in report.preempted:
            self._note_preempted(self.holders[slot])
        for slot in (*plan.preempted, *report.preempted):
            self._note_way(self.holders[slot], report, plan)

    def note_done(self, done: StepDone) -> None:
        """The oldest step in flight is done."""
        self._pop(done.step)
        self._news.settled.append(done)
        for sequence_id in done.sequence_ids[done.is_finished].tolist():
            self.end(sequence_id)

    def note_void(self, step: int, generation: int, slots: set[int]) -> bool:
        """The oldest step in flight was voided; `slots` have rows in it or in later steps. Returns whether it was the
        first of its generation."""
        self._pop(step)
        self._news.voided.append(step)
        if generation != self.generation:
            return False
        self.generation += 1
        if self.outstanding is not None:
            slots = slots | set(self.outstanding.slots.tolist())
        self._take_back([self.holders[slot] for slot in sorted(slots) if slot in self.holders], tell=True)
        self._give_up_swapped(step)
        return True

    def rebuild(self) -> None:
        """Its state is lost: all running and swapped sequences are recomputed."""
        self._take_back(list(self.holders.values()), tell=True)
        self._give_up_swapped(-1)

    def _pop(self, step: int) -> None:
        assert step == self.completed_step + 1
        self.completed_step, self._must_wait = step, False

    def _note_grant(self, plan: StepPlan, report: PlanReport) -> None:
        self.last_granted = report.step
        columns = (plan.slots, plan.num_wanted, report.num_granted, report.num_cached)
        for slot, wanted, granted, cached in zip(*(column.tolist() for column in columns), strict=True):
            if not granted:
                continue
            seq = self.holders[slot]
            seq.last_step = report.step
            if cached:
                seq.num_on_host = 0
            if seq.state == "running":
                seq.num_computed += granted + cached
                seq.num_known += granted + cached == wanted

    def _note_preempted(self, seq: Seq) -> None:
        if seq.state == "running":
            seq.num_preempted += 1
            seq.state = "returning"
            self._leave(seq)

    def _note_way(self, seq: Seq, report: PlanReport, plan: StepPlan) -> None:
        num_swapped = report.swapped.get(seq.slot, 0)
        if num_swapped and seq.state == "returning" and plan.generation == self.generation:
            seq.num_on_host, seq.swapped_step = num_swapped, report.step
        elif num_swapped:
            self._news.discarded.append(seq.sequence_id)

    def _leave(self, seq: Seq) -> None:
        is_asked_for = self.outstanding is not None and seq.slot in self.outstanding.slots
        step = self.outstanding.step if self.outstanding is not None and is_asked_for else seq.last_step
        self._leaving.append((step, seq.slot))

    def _take_back(self, sequences: Iterable[Seq], *, tell: bool) -> None:
        for seq in sequences:
            if seq.state == "running":
                seq.state = "returning"
                self._leave(seq)
                if tell:
                    self._news.dropped.append(seq.slot)

    def _give_up_swapped(self, void_step: int) -> None:
        for seq in self.sequences.values():
            if seq.swapped_step >= void_step:
                self._discard(seq)

    def _discard(self, seq: Seq) -> None:
        if seq.num_on_host:
            self._news.discarded.append(seq.sequence_id)
            seq.num_on_host = 0


def _started(seq: Seq) -> Started:
    token_ids = np.array(seq.text.tokens, np.int32)
    name = f"r{seq.sequence_id}"
    return Started(seq.slot, seq.sequence_id, name, token_ids, seq.num_prompt, PARAMS, 0, seq.text.salt)
