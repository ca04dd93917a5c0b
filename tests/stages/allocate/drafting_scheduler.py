"""A naive scheduler whose sequences guess tokens, some of them wrong."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np

from millrace.stages.messages import Drafts, PlanReport, StepPlan
from tests.stages.schedule.naive_scheduler import NaiveScheduler, Seq


class DraftingScheduler(NaiveScheduler):
    """A naive scheduler that drafts for decodes whose last token the host knows."""

    def __init__(self, dice: Random, num_slots: int, max_model_len: int, *, allows_partial: bool, protects_after: int):
        super().__init__(num_slots, max_model_len, allows_partial=allows_partial, protects_after=protects_after)
        self.dice = dice
        self.chance = dice.choice((0.0, 0.5))  # of drafts
        self.most_drafts = 3
        self.accepted: list[tuple[Seq, int]] = []
        self.decoding: np.ndarray = np.zeros(0, np.intp)  # slots of the last plan, if it had only decodes

    def next_plan(self, **options: int) -> StepPlan | None:
        plan = self.plan(**options)
        if plan is None:
            return None
        accepted = tuple((seq.slot, count) for seq, count in self.accepted)
        self.accepted.clear()
        plan = replace(plan, accepted=accepted)
        if len(plan.slots) and (plan.num_wanted == 1).all() and not self.num_in_flight:
            counts = np.array([self._num_drafts(self.holders[slot]) for slot in plan.slots.tolist()], np.int32)
            if counts.any():
                drafts = Drafts(counts, np.zeros(int(counts.sum()), np.intp))
                wanted = plan.num_wanted + counts
                budget = max(plan.token_budget, int(wanted.sum()))
                plan = replace(plan, num_wanted=wanted, drafts=drafts, is_decode=False, token_budget=budget)
        if plan.is_decode and np.array_equal(plan.slots, self.decoding):
            plan = replace(plan, slots=self.decoding)  # the very same array, for steady decoding
        self.decoding = plan.slots if plan.is_decode else np.zeros(0, np.intp)
        self.outstanding = plan
        return plan

    def _leave(self, seq: Seq) -> None:
        super()._leave(seq)
        self.accepted = [entry for entry in self.accepted if entry[0] is not seq]

    def _num_drafts(self, seq: Seq) -> int:
        if self.dice.random() >= self.chance or len(seq.text.tokens) != seq.num_known:
            return 0
        return (
            self.dice.randint(0, min(self.most_drafts, seq.limit - seq.num_known - 1))
            if seq.limit - seq.num_known > 1
            else 0
        )

    def hear_of(self, report: PlanReport, drafts: Drafts | None) -> None:
        """Takes a report. Of rows whose drafts were granted, the drafts are not known yet."""
        plan = self.outstanding
        if plan is not None and plan.drafts is not None and not report.is_void:
            counts = plan.drafts.counts
            certain = plan.num_wanted - counts
            granted = report.num_granted if drafts is None else np.minimum(report.num_granted, certain)
            self.outstanding = replace(plan, num_wanted=certain)
            for slot in [] if drafts is None else plan.slots[(counts > 0) & (granted > 0)].tolist():
                self.holders[slot].has_drafts = True
            report = replace(report, num_granted=granted)
        self.hear(report)

    def accept(self, seq: Seq, count: int) -> None:
        """The step of a sequence accepted `count` drafts."""
        seq.has_drafts = False
        if seq.state == "running" and count:
            seq.num_known += count
            seq.num_computed += count
            self.accepted.append((seq, count))
