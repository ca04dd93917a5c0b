"""Trace records of the waiting queue: admissions, resumptions, parking, waiting reasons.

Reads the scheduler's state and never changes it.
"""

from __future__ import annotations

from ...runtime.stage import Context
from ...runtime.trace.tracer import NO_SLOT, EventKind
from ..messages import PlanReport, StepDone, StepPlan
from .scheduler import Scheduler
from .sequence import Sequence, State

STEP_PLANNED = int(EventKind.STEP_PLANNED)


class QueueTrace:
    """Traces one scheduler. Call `planned` with each plan, then `reported` with its report."""

    def __init__(self, context: Context, scheduler: Scheduler) -> None:
        self._tracer, self._source, self._now = context.tracer, context.source, context.env.now
        self._scheduler = scheduler
        self._recompute, self._swap = context.tracer.source("recompute"), context.tracer.source("swap")
        self._waiting_for = ""
        self._drafted = (0, 0, 0)  # totals so far: rows with drafts, drafts, accepted drafts
        self._plan: StepPlan | None = None
        if scheduler.adapters is not None:
            scheduler.adapters.on_aside = self._set_aside
        self._starting: dict[int, tuple[Sequence, int]] = {}  # by slot, not served yet: (sequence, tokens on the host)

    def planned(self, plan: StepPlan) -> None:
        """Writes STEP_PLANNED."""
        self._plan, scheduler = plan, self._scheduler
        if not self._tracer.enabled:
            return
        num_rows = num_tokens = len(plan.slots)
        if not plan.is_decode:
            num_tokens = int(plan.num_wanted.sum())
        num_running, num_waiting = scheduler.slots.num_running, scheduler.num_waiting
        self._tracer.bind()(STEP_PLANNED, self._source, plan.step, num_rows, num_tokens, num_running, num_waiting)
        for started in plan.started:
            sequence = scheduler.sequences.get(started.sequence_id)
            if sequence is not None:
                self._starting[started.slot] = (sequence, sequence.num_swapped)

    def reported(self, report: PlanReport) -> None:
        """Writes REQUEST_ADMITTED or RESUMED for sequences served for the first time in their slot."""
        if not self._starting or self._plan is None:
            return
        rows = zip(self._plan.slots.tolist(), report.num_granted.tolist(), report.num_cached.tolist(), strict=True)
        for slot, num_granted, num_cached in rows:
            if num_granted and slot in self._starting:
                self._trace_start(report.step, slot, *self._starting.pop(slot), num_cached)

    def _trace_start(self, step: int, slot: int, sequence: Sequence, num_swapped: int, num_cached: int) -> None:
        if sequence.num_starts == 1:
            waited_us = int((self._now() - sequence.arrival_s) * 1e6)
            values = (sequence.sequence_id, num_cached, waited_us)
            self._tracer.emit(EventKind.REQUEST_ADMITTED, self._source, step, *values)
        else:
            how = self._swap if num_swapped else self._recompute
            counts = (self._num_blocks(num_cached), num_cached)
            self._tracer.emit(EventKind.RESUMED, self._source, step, slot, how, *counts)

    def _set_aside(self, sequence: Sequence, is_aside: bool) -> None:
        """Writes SET_ASIDE."""
        self._tracer.emit(EventKind.SET_ASIDE, self._source, 0, sequence.sequence_id, is_aside)

    def done(self, done: StepDone) -> None:
        """Writes STEP_DRAFTED for a step with drafts. Call it after the scheduler has taken `done`."""
        speculation, before = self._scheduler.speculation, self._drafted
        if speculation.num_drafts == before[0]:
            return
        self._drafted = (speculation.num_drafts, speculation.num_draft_tokens, speculation.num_accepted_tokens)
        num_rows, num_drafts, num_accepted = (now - then for now, then in zip(self._drafted, before, strict=True))
        counts = (num_rows, num_drafts, num_accepted, self._scheduler.num_running)
        self._tracer.emit(EventKind.STEP_DRAFTED, self._source, done.step, *counts)

    def parked(self, sequence_id: int, kind: EventKind) -> None:
        """Writes PARKED or UNPARKED. Ignores unknown ids, which have ended."""
        sequence = self._scheduler.sequences.get(sequence_id)
        if sequence is not None:
            has_slot = sequence.state is State.RUNNING
            num_tokens = int(self._scheduler.slots.num_computed[sequence.slot]) if has_slot else 0
            place = (sequence.slot if has_slot else NO_SLOT, self._num_blocks(num_tokens))
            self._tracer.emit(kind, self._source, 0, *place, sequence_id)

    def line(self) -> None:
        """Writes WAITING_FOR if that has changed."""
        waiting_for = self._scheduler.waiting_for
        if waiting_for != self._waiting_for:
            self._waiting_for = waiting_for
            counts = (self._scheduler.num_waiting + self._scheduler.num_swapped, self._scheduler.num_running)
            reason_name = self._tracer.source(waiting_for)
            self._tracer.emit(EventKind.WAITING_FOR, self._source, 0, *counts, reason_name)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._scheduler.limits.block_size)
