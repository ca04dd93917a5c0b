"""Keeps the books of steps: planned, granted, done or void; and so says what each next plan tells allocate.

Plain code behind the schedule stage. Knows sequences and steps; refuses to know blocks (allocate does), clocks, and the
event loop. Told the same things in the same order, it decides the same. What a step should run is chosen in
`planner.py`, who is better than whom in `policy.py`, and what becomes of each sequence in `lifecycle.py`.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

from ..array_checks import num_true
from ..errors import Failed, RequestError
from ..messages import Drafts, Guess, PlanReport, StepDone, StepPlan, StepVoid, TokenRequest
from .admitter import Entrance
from .lifecycle import Lives
from .planner import Flight, Planner
from .policy import Policy
from .sequence import Sequence, State
from .service_order import Steady, Wishes
from .speculation import Speculation
from .step_budget import StepSize
from .step_time_model import StepContents

MAX_VOIDS_ALONE = 2  # steps a sequence may make fail all by itself before it is given up


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    steps_in_flight: int = 2  # K
    enable_chunked_prefill: bool = True
    itl_target_ms: float = 0.0  # that a step beside answers may take; 0: as long as it takes
    num_speculative_tokens: int = 0  # drafts of a step, at most; 0: nobody drafts


class Scheduler:
    """Holds every sequence from its arrival to its end, and makes one plan at a time.

    Call `add`, `on_report`, `on_done`, `on_void`, `take_guess`, `end`, `park` and `unpark` as things happen, then
    `plan` until it returns None. A plan is outstanding until its report; at most K granted steps are in flight. Steps
    are counted from `first_step`, where another engine has stopped.
    """

    def __init__(self, limits: Limits, policy: Policy | None = None, first_step: int = 0) -> None:
        self.limits = limits
        self.policy = policy or Policy()
        self.lives = Lives(limits.max_num_seqs, self.policy)
        self.slots = self.lives.slots
        self.waiting = self.lives.waiting
        self.last_granted = first_step - 1  # step
        self.completed_step = first_step - 1
        self._told_step = first_step - 1  # the completed step that allocate was last told of
        self._generation = 0
        self._outstanding: StepPlan | None = None
        self._flights: deque[Flight] = deque()
        self._report: PlanReport | None = None  # the last one
        self._must_wait = False  # nothing could be granted: plan again when a step is done
        self._row_limit = limits.max_num_seqs  # lowered when steps fail, until the one at fault is alone
        self._settled: list[StepDone] = []  # to tell allocate in the next plan, as the next
        self._voided: list[int] = []
        target_s, most = limits.itl_target_ms / 1e3, limits.max_num_batched_tokens
        self._step_size = StepSize(target_s, most) if target_s else None  # None: always the most
        most_each = limits.block_size - 1  # no more than a block of tokens at a time, for the cache
        self.speculation = Speculation(limits.num_speculative_tokens, most_each, limits.steps_in_flight)
        self._entrance = Entrance(self.lives, limits.block_size)
        self._planner = Planner(self.lives, self._entrance, self.speculation, self._step_size, most)

    # -- asking

    @property
    def sequences(self) -> dict[int, Sequence]:
        """All that are not over, by id."""
        return self.lives.sequences

    @property
    def num_in_flight(self) -> int:
        """Steps granted and not done."""
        return self.last_granted - self.completed_step

    @property
    def has_credit(self) -> bool:
        """Whether another step may be planned now: allocate has answered, and fewer than K are in flight."""
        return self._outstanding is None and self.num_in_flight < self.limits.steps_in_flight

    @property
    def has_last_credit(self) -> bool:
        """Whether one step may be planned now, and no second one."""
        return self.has_credit and self.num_in_flight == self.limits.steps_in_flight - 1

    @property
    def expected_s(self) -> float:
        """Seconds that the step which runs takes as a rule; 0 if none does, or it can not be told."""
        running, step_size = self._flights[0] if self._flights else None, self._step_size
        if running is None or step_size is None or running.contents is None or running.generation != self._generation:
            return 0.0
        return step_size.expected_s(running.contents)

    @property
    def is_asking(self) -> bool:
        """Whether allocate has a plan with rows that it has not answered yet."""
        return self._outstanding is not None and len(self._outstanding.slots) > 0

    @property
    def may_plan_after_report(self) -> bool:
        """Whether there may be a credit left once the outstanding plan is granted. If not, some step in flight is done
        before another can be planned, whatever the report says."""
        return self.num_in_flight == 0 or self.num_in_flight + 1 < self.limits.steps_in_flight

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot, parked ones too."""
        return self.slots.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to run, but for swapped ones."""
        return len(self.waiting) + self.lives.num_returning - self.lives.num_swapped

    @property
    def waiting_for(self) -> str:
        """What the first in line lacks: "slots", "blocks", or "swapped" if it waits for blocks to come back from the
        host; "step" if it is only not its turn; "" when nobody waits."""
        if self.lives.num_returning:
            return "blocks"
        if not len(self.waiting):
            return ""
        return self.admission_blocked_reason or ("step" if self.slots.num_free else "slots")

    @property
    def admission_blocked_reason(self) -> str:
        """What the first in line lacked when it was last looked at: "blocks", or "swapped" if it is swapped out."""
        return self._entrance.blocked_reason

    @property
    def num_swapped(self) -> int:
        """Sequences that wait to come back from the host."""
        return self.lives.num_swapped

    @property
    def num_parked(self) -> int:
        """Sequences whose clients do not read."""
        return self.lives.num_parked

    @property
    def is_idle(self) -> bool:
        """Whether there is nobody whose work should be moving."""
        return len(self.sequences) == self.num_parked

    @property
    def step_token_budget(self) -> int:
        """Tokens of a step, at most, when prompts were last computed beside answers."""
        return self.limits.max_num_batched_tokens if self._step_size is None else self._step_size.last

    @property
    def preemptions(self) -> Counter[tuple[str, str]]:
        """How often, by (how: swap or recompute, for what: blocks or slot)."""
        return self.lives.preemptions

    @property
    def num_preemptions(self) -> int:
        return self.preemptions.total()

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens computed once more after a preemption."""
        return self.lives.num_recomputed_tokens

    # -- being told

    def add(self, request: TokenRequest) -> None:
        """A prompt arrived; its choices wait from now on. Adding it twice changes nothing."""
        self.lives.add(request, self.limits.max_model_len)

    def end(self, sequence_id: int) -> None:
        """A sequence is over, wherever it is: finished, stopped or cancelled. Unknown ids are over already."""
        self.lives.end(sequence_id)

    def park(self, sequence_id: int) -> None:
        """Its client does not read: it is not served, and the first to give way. Unknown ids are over already."""
        self.lives.park(sequence_id)

    def unpark(self, sequence_id: int) -> None:
        """Its client reads again."""
        self.lives.unpark(sequence_id)

    def on_report(self, report: PlanReport) -> None:
        """Allocate's answer to the outstanding plan."""
        plan, self._outstanding, self._report = self._outstanding, None, report
        assert plan is not None and report.step == plan.step, f"a report of step {report.step} was not asked for"
        if report.is_reset:
            self.lives.take_back(self.slots.running().tolist(), tell=False)
            self.lives.give_up_swapped(-1)
            return
        if report.is_void:
            self._must_wait = len(plan.slots) > 0 and self.num_in_flight > 0
        else:
            self._note_grant(plan, report)
        for slot in report.preempted:
            self.lives.note_preempted(slot, "blocks")
        for slot in (*plan.preempted, *report.preempted):
            self.lives.note_way(slot, report, has_fallen=plan.generation != self._generation)

    def on_done(self, done: StepDone) -> None:
        """A step's tokens are known."""
        flight = self._pop_flight(done.step)
        if self._step_size is not None and flight.contents is not None and done.took_us:
            self._step_size.note(flight.contents, done.took_us / 1e6)
        self._row_limit = min(self.limits.max_num_seqs, 2 * self._row_limit)
        if not self.slots.knows_all(done.slots, done.sequence_ids):
            known = self.slots.knows(done.slots, done.sequence_ids)
            done = StepDone(
                done.step,
                done.slots[known],
                done.sequence_ids[known],
                done.places[known],
                done.token_ids[known],
                done.is_finished[known],
                done.most_tokens,
                done.took_us,
            )
        self.slots.note_tokens(done.slots, done.places, done.token_ids)
        self._settled.append(done)
        for slot, num_drafts in flight.drafted.items():
            self._note_drafts(slot, num_drafts, int(np.count_nonzero(done.slots == slot)))
        if num_true(done.is_finished):
            for sequence_id in done.sequence_ids[done.is_finished].tolist():
                self.end(sequence_id)

    def on_void(self, void: StepVoid) -> list[tuple[Sequence, RequestError]]:
        """A step did not happen. Everything that was in flight with it is computed anew, in smaller steps. Returns the
        sequences to give up, with the error their clients get."""
        flight = self._pop_flight(void.step)
        self._voided.append(void.step)
        if void.generation != self._generation:
            return []  # it fell with an earlier one, and was dealt with then
        self._generation += 1
        self._row_limit = max(1, len(flight.slots) // 2)
        guilty = self._find_guilty(flight)
        plans = [flight.slots, *(later.slots for later in self._flights)]
        if self._outstanding is not None:
            plans.append(self._outstanding.slots)
        slots = np.unique(np.concatenate(plans))
        self.lives.take_back(slots[self.slots.is_running[slots]].tolist(), tell=True)
        self.lives.give_up_swapped(void.step)
        for sequence in guilty:
            self.end(sequence.sequence_id)
        return [(sequence, Failed("the model failed on this request")) for sequence in guilty]

    def rebuild(self) -> None:
        """After a crash: trusts nothing about what runs or is swapped out, and computes it all anew."""
        self.lives.take_back(self.slots.running().tolist(), tell=True)
        self.lives.give_up_swapped(-1)

    # -- drafts

    def slots_to_guess(self) -> list[int]:
        """Those of which a guess is worth its time now. Changes nothing: who replays a recording does not ask."""
        if not self.speculation.num_watched:
            return []
        return self.speculation.due(self.slots, {slot for flight in self._flights for slot in flight.slots.tolist()})

    def take_guess(self, guess: Guess) -> None:
        """What may come next in an answer."""
        self.speculation.take(guess, self.slots)
        if self.speculation.is_drafting:
            self._planner.look_again()

    def _note_drafts(self, slot: int, num_drafts: int, num_new: int) -> None:
        """Of the first new token it was known that it comes; each further one is a draft that turned out right."""
        num_accepted = max(0, num_new - 1)
        self.speculation.note(slot, num_drafts, num_accepted)
        if num_accepted and self.slots.is_running[slot]:
            self.slots.num_known[slot] += num_accepted
            self.slots.num_computed[slot] += num_accepted
            self.lives.news.accepted.append((slot, num_accepted))

    # -- planning

    def plan(self) -> StepPlan | None:
        """The next plan, or None while there is nothing to say or nobody to say it to."""
        if not self.has_credit:
            return None
        self.lives.settle(self.completed_step, self.last_granted)
        if self._must_wait:
            return None
        wishes, drafts, token_budget = self._planner.choose(self._flights, self._report, self._row_limit)
        if not len(wishes.slots) and not self._has_news():
            return None
        self._outstanding = self._make_plan(wishes, drafts, token_budget)
        self.slots.last_step[wishes.slots] = self._outstanding.step
        self._told_step = self.completed_step
        return self._outstanding

    def _has_news(self) -> bool:
        """Whether allocate could free something if it knew what has happened since the last plan."""
        if self.lives.news.frees:
            return True
        report = self._report
        is_settling = report is not None and report.num_quarantined + report.num_host_quarantined > 0
        return is_settling and self.completed_step > self._told_step

    def _make_plan(self, wishes: Wishes, drafts: Drafts | None, token_budget: int) -> StepPlan:
        news = self.lives.take_news()
        settled, self._settled = self._settled, []
        voided, self._voided = self._voided, []
        return StepPlan(
            step=self.last_granted + 1,
            generation=self._generation,
            completed_step=self.completed_step,
            slots=wishes.slots,
            num_wanted=wishes.num_wanted if drafts is None else wishes.num_wanted + drafts.counts,
            reaches_end=wishes.reaches_end,
            token_budget=token_budget,
            victims=wishes.victims,
            num_victims=wishes.num_victims,
            num_reserved=wishes.num_reserved,
            is_decode=isinstance(wishes, Steady),
            allows_partial=self.limits.enable_chunked_prefill,
            drafts=drafts,
            accepted=news.accepted,
            started=tuple(news.started),
            ended=news.ended,
            preempted=news.preempted,
            dropped=news.dropped,
            discarded=news.discarded,
            settled=settled,
            voided=voided,
        )

    # -- books

    def _note_grant(self, plan: StepPlan, report: PlanReport) -> None:
        self.last_granted = report.step
        table, lives = self.slots, self.lives
        steady = self._planner.steady_if_granted(report)
        if steady is not None:
            contents = None
            if self._step_size is not None:
                contents = StepContents(num_decode=len(plan.slots), num_context=steady.num_context)
            self._flights.append(Flight(report.step, plan.generation, plan.slots, contents))
            steady.note_granted(table)
            return
        rows = report.num_granted.nonzero()[0]
        slots, granted, num_cached = plan.slots[rows], report.num_granted[rows], report.num_cached[rows]
        wanted, drafted = plan.num_wanted[rows], {}
        if plan.drafts is not None:  # a row is granted all of its drafts, or a single token
            counts = plan.drafts.counts[rows]
            wanted = wanted - counts
            more = (granted - wanted) * (counts > 0)
            drafted = {slot: count for slot, count in zip(slots.tolist(), more.tolist(), strict=True) if count}
            granted = np.minimum(granted, wanted)
        contents = None
        if self._step_size is not None:
            starts = table.num_computed[slots] + num_cached
            contents = StepContents.of(starts, granted, num_drafts=sum(drafted.values()))
        self._flights.append(Flight(report.step, plan.generation, slots, contents, drafted))
        for row in num_cached.nonzero()[0].tolist():
            lives.note_begun(int(slots[row]), int(num_cached[row]))
        if np.count_nonzero(granted > 1):
            lives.note_computed(slots.tolist(), granted)
        for row in (table.num_computed[slots] == 0).nonzero()[0].tolist():
            self._entrance.note_found(int(slots[row]), int(num_cached[row]))
        progress = np.where(table.is_running[slots], granted + num_cached, 0)
        table.num_computed[slots] += progress
        is_sampled = plan.reaches_end[rows] & (progress == wanted)
        table.num_known[slots] += is_sampled

    def _pop_flight(self, step: int) -> Flight:
        flight = self._flights.popleft()
        assert flight.step == step, f"step {step} is done before step {flight.step}"
        self.completed_step = step
        self._must_wait = False
        return flight

    def _find_guilty(self, flight: Flight) -> list[Sequence]:
        """The sequence that made the step fail, once that is beyond doubt: it was alone, and not for the first time."""
        sequence = self.slots.sequences[int(flight.slots[0])] if len(flight.slots) == 1 else None
        if sequence is None or sequence.state is State.OVER:
            return []
        sequence.num_voids_alone += 1
        return [sequence] if sequence.num_voids_alone >= MAX_VOIDS_ALONE else []

    def check(self) -> None:
        """Raises AssertionError unless every sequence is in exactly one place, and every step accounted for."""
        self.lives.check()
        assert 0 <= self.num_in_flight <= self.limits.steps_in_flight
        assert len(self._flights) == self.num_in_flight
