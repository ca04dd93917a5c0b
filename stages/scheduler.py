"""Decides what the next step should run: decodes before prefills, and otherwise as the policy says.

Plain code behind the schedule stage. Knows sequences and steps; refuses to know blocks (allocate does), clocks, and the
event loop. Told the same things in the same order, it decides the same. Who is better than whom is in `policy.py`, what
becomes of each sequence in `lives.py`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..runtime.message import message
from .columns import num_true
from .errors import Failed, RequestError
from .expectation import FoundShare
from .lineup import Steady
from .lives import Lives
from .messages import (
    Bools,
    Drafts,
    Guess,
    Indices,
    Ints,
    PlanReport,
    StepDone,
    StepPlan,
    StepVoid,
    TokenRequest,
)
from .policy import Policy
from .sequences import Sequence, State
from .speculation import Speculation
from .step_costs import StepContents
from .step_size import StepSize, Wish

MAX_GROWTH = 6  # blocks that are left to a running sequence when somebody is let in, where nothing can be swapped
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


@message
class _Flight:
    """A granted step that is not done yet."""

    step: int
    generation: int
    slots: Indices  # of the rows it runs
    contents: StepContents | None  # for who chooses the size of steps
    drafted: Mapping[int, int] = field(default_factory=dict)  # slot -> drafts


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
        self.admission_blocked_reason = ""  # what the first in line lacks: "blocks", or "swapped" if it is swapped out
        self.last_granted = first_step - 1  # step
        self.completed_step = first_step - 1
        self._told_step = first_step - 1  # the completed step that allocate was last told of
        self._generation = 0
        self._outstanding: StepPlan | None = None
        self._flights: deque[_Flight] = deque()
        self._steady: Steady | None = None  # None, or of another lineup: rows are to be looked at
        self._settled: list[StepDone] = []  # to tell allocate in the next plan, as the next
        self._voided: list[int] = []
        self._found = FoundShare()
        target_s, most = limits.itl_target_ms / 1e3, limits.max_num_batched_tokens
        self._step_size = StepSize(target_s, most) if target_s else None  # None: always the most
        most_each = limits.block_size - 1  # no more than a block of tokens at a time, for the cache
        self.speculation = Speculation(limits.num_speculative_tokens, most_each, limits.steps_in_flight)
        self._row_limit = limits.max_num_seqs  # lowered when steps fail, until the one at fault is alone
        self._report: PlanReport | None = None  # the last one
        self._must_wait = False  # nothing could be granted: plan again when a step is done

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
            self._steady = None

    def _note_drafts(self, slot: int, num_drafts: int, num_new: int) -> None:
        """Of the first new token it was known that it comes; each further one is a draft that turned out right."""
        num_accepted = max(0, num_new - 1)
        self.speculation.note(slot, num_drafts, num_accepted)
        if num_accepted and self.slots.is_running[slot]:
            self.slots.num_known[slot] += num_accepted
            self.slots.num_computed[slot] += num_accepted
            self.lives.news.accepted.append((slot, num_accepted))

    def _held(self, slots: Indices, *, is_drafting_time: bool) -> Bools:
        """[R] rows that wait for the outcome of a step: it decides how far they have come, or what to draft behind."""
        held = [slot for flight in self._flights for slot in flight.drafted]
        drafting = self.speculation.drafting()
        if is_drafting_time and any(np.isin(drafting, flight.slots).any() for flight in self._flights):
            held += drafting  # all of them, so that they go on together, in one step
        is_held: Bools = np.isin(slots, held)
        return is_held

    # -- planning

    def plan(self) -> StepPlan | None:
        """The next plan, or None while there is nothing to say or nobody to say it to."""
        if self._outstanding is not None or self.num_in_flight >= self.limits.steps_in_flight:
            return None
        self.lives.settle(self.completed_step, self.last_granted)
        if self._must_wait:
            return None
        if self.lives.num_parked:
            self._move_parked()
        has_waiting = len(self.waiting) > 0
        if has_waiting and not self.slots.num_free:
            self._make_way()
        slots, num_wanted = self._rows()
        budget = self._token_budget(slots, num_wanted)
        if has_waiting and self._admit(budget - int(num_wanted.sum())):
            slots, num_wanted = self._rows()
        if not len(slots) and not self._has_news():
            return None
        self._outstanding = self._make_plan(slots, num_wanted, self._drafts(slots, num_wanted, budget), budget)
        self.slots.last_step[slots] = self._outstanding.step
        self._told_step = self.completed_step
        return self._outstanding

    def _has_news(self) -> bool:
        """Whether allocate could free something if it knew what has happened since the last plan."""
        if self.lives.news.frees:
            return True
        report = self._report
        is_settling = report is not None and report.num_quarantined + report.num_host_quarantined > 0
        return is_settling and self.completed_step > self._told_step

    def _rows(self) -> tuple[Indices, Ints]:
        """The rows to ask for, decodes first, each group in the order of service: (slots, tokens wanted)."""
        lineup = self.lives.lineup
        slots, steady = lineup.slots, self._steady
        if steady is not None and steady.lineup is lineup and steady.num_plans > 0 and len(slots) <= self._row_limit:
            return slots, steady.num_wanted
        self.speculation.line_up(lineup, self.slots)
        num_left = self.slots.num_known[slots] - self.slots.num_computed[slots]
        is_runnable = self.slots.num_known[slots] < self.slots.limit[slots]
        is_decode = is_runnable & (num_left == 1)
        is_prefill = is_runnable & (num_left > 1)
        is_steady = 0 < len(slots) <= self._row_limit and np.count_nonzero(is_decode) == len(slots)
        if self.speculation.is_drafting or any(flight.drafted for flight in self._flights):
            is_steady = False
            is_decode &= ~self._held(slots, is_drafting_time=not np.count_nonzero(is_prefill))
        if is_steady:
            self._steady = Steady.of(lineup, self.slots, num_left)
            return slots, num_left
        self._steady = None
        rows = np.concatenate([slots[is_decode], slots[is_prefill]])
        wanted = np.concatenate([num_left[is_decode], num_left[is_prefill]])
        return rows[: self._row_limit], wanted[: self._row_limit]

    def _token_budget(self, slots: Indices, num_wanted: Ints) -> int:
        """Tokens of the step: where it is to compute prompts beside answers, as its target allows."""
        most, size = self.limits.max_num_batched_tokens, self._step_size
        if size is None:
            return most
        num_decode = int(np.count_nonzero(num_wanted == 1))  # they come first
        may_begin = len(self.waiting) and self.slots.num_free and not self.lives.num_returning
        if not num_decode or (num_decode == len(slots) and not may_begin):
            return most
        starts = self.slots.num_computed[slots]
        num_context = int(starts[:num_decode].sum()) + num_decode
        prompts = zip(num_wanted[num_decode:].tolist(), starts[num_decode:].tolist(), strict=True)
        in_line = (Wish(self._num_to_compute(sequence), 0) for sequence in self.waiting)
        return size.choose(num_decode, num_context, [Wish(*prompt) for prompt in prompts], in_line)

    # -- letting in

    def _move_parked(self) -> None:
        """Takes slots from parked sequences for any that wait; and their blocks before they are wanted, while there is
        one left for each row and what the first in line begins with: a copy takes some steps, and nobody is to wait."""
        first, report, table = self.waiting.peek(), self._report, self.slots
        parked = (table.is_running & table.is_parked).nonzero()[0].tolist()
        num_slots = len(self.waiting) - table.num_free - table.num_leaving
        num_blocks = 0
        if report is not None:
            wanted = len(self.lives.lineup.slots) + (0 if first is None else self._need(first))
            num_blocks = wanted - report.num_free - report.num_quarantined
        for slot in parked:
            if num_slots <= 0 and num_blocks <= 0:
                return
            num_held = -(-int(table.num_computed[slot]) // self.limits.block_size)
            if num_slots > 0 or num_held:
                self.lives.take_slot(slot, "slot" if num_slots > 0 else "blocks")
                num_slots, num_blocks = num_slots - 1, num_blocks - num_held

    def _make_way(self) -> None:
        """Takes slots from running sequences for strictly better ones that wait; who is served last gives way first.
        They are let in once no step in flight knows the slots any more."""
        first = self.waiting.peek()
        if first is None or not self._is_better_than_running(first):
            return
        line = self.waiting.in_order()[self.slots.num_leaving :]  # the others have slots on their way to them
        for slot in self.lives.lineup.slots[::-1].tolist():
            victim = self.slots.sequences[slot]
            assert victim is not None
            if not line or not self.policy.is_better(line[0], victim):
                return
            if not victim.is_protected:
                del line[0]
                self.lives.take_slot(slot, "slot")

    def _is_better_than_running(self, sequence: Sequence) -> bool:
        """Whether it is better than the one that is served last."""
        slots = self.lives.lineup.slots
        last = self.slots.sequences[slots[-1]] if len(slots) else None
        return last is not None and self.policy.is_better(sequence, last)

    def _admit(self, budget: int) -> bool:
        """Gives slots to those that wait, in order, while tokens (`budget` of them), slots and blocks are likely to be
        there. Whether anybody got one."""
        first = self.waiting.peek()
        self.admission_blocked_reason = ""
        if first is None or self.lives.num_returning or not self.slots.num_free:
            return False
        spare, num_before = self._spare_blocks(), self.num_running
        while first is not None and self.slots.num_free and budget > 0 and self.num_running < self._row_limit:
            need = self._need(first)
            is_tight = spare is not None and self.num_running > 0 and not self.policy.may_enter(first, need, spare)
            if is_tight and not self._is_better_than_running(first):  # else it may take what it lacks
                self.admission_blocked_reason = "swapped" if first.num_swapped else "blocks"
                break
            budget -= self._num_to_compute(first)
            self.lives.start(self.waiting.pop())
            spare = None if spare is None else spare - need - 1
            first = self.waiting.peek()
        return self.num_running > num_before

    def _num_to_compute(self, sequence: Sequence) -> int:
        """Tokens of it that are likely neither on the host nor in the prefix cache."""
        num_tokens = len(sequence.token_ids)
        return max(1, num_tokens - max(sequence.num_swapped, sequence.num_expected_cached, self._found.of(num_tokens)))

    def _need(self, sequence: Sequence) -> int:
        """Blocks that a sequence begins with: for what is known of it and one token, or all it may ever need."""
        num_tokens = max(len(sequence.token_ids) + 1, sequence.limit if sequence.is_protected else 0)
        return -(-num_tokens // self.limits.block_size)

    def _spare_blocks(self) -> int | None:
        """Blocks likely to be left when every running sequence has what it needs now and some more, those of parked
        ones included; None before the first report. A guess that only keeps the newest from being let in to be
        preempted at once: that costs little where it is swapped, and much where it is computed again."""
        report, table = self._report, self.slots
        if report is None:
            return None
        slots = self.lives.lineup.slots
        owed = self._blocks(table.num_known[slots]) - self._blocks(table.num_computed[slots])
        if report.num_host_free:
            growth = len(slots)
        else:  # what is preempted is computed again: fewer are let in
            half_left = self._blocks(table.limit[slots] - table.num_known[slots]) // 2
            growth = int(np.clip(half_left, 1, MAX_GROWTH).sum())
        parked = self._blocks(table.num_computed[table.is_running & table.is_parked])
        return report.num_free + report.num_quarantined + int(parked.sum()) - int(owed.sum()) - growth

    def _drafts(self, slots: Indices, num_wanted: Ints, token_budget: int) -> Drafts | None:
        """What rows are to compute besides; nothing while any computes a prompt."""
        if not self.speculation.is_drafting or np.count_nonzero(num_wanted > 1):
            return None
        return self.speculation.drafts(slots, self.slots, token_budget)

    def _make_plan(self, slots: Indices, num_wanted: Ints, drafts: Drafts | None, token_budget: int) -> StepPlan:
        lineup, steady = self.lives.lineup, self._steady
        is_steady = steady is not None and num_wanted is steady.num_wanted
        if steady is not None and is_steady:
            reaches_end, num_victims, num_reserved = steady.reaches_end, steady.num_victims, steady.num_reserved
        else:
            reaches_end, num_victims = np.ones(len(slots), np.bool_), lineup.num_victims[slots]
            num_reserved = self.slots.reserve[slots] if lineup.has_reserves else None
        news = self.lives.take_news()
        settled, self._settled = self._settled, []
        voided, self._voided = self._voided, []
        return StepPlan(
            step=self.last_granted + 1,
            generation=self._generation,
            completed_step=self.completed_step,
            slots=slots,
            num_wanted=num_wanted if drafts is None else num_wanted + drafts.counts,
            reaches_end=reaches_end,
            token_budget=token_budget,
            victims=lineup.victims,
            num_victims=num_victims,
            num_reserved=num_reserved,
            is_decode=is_steady,
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
        steady, table, lives = self._steady, self.slots, self.lives
        if steady is not None and report.num_granted is steady.num_wanted and steady.lineup is lives.lineup:
            contents = None
            if self._step_size is not None:
                contents = StepContents(num_decode=len(plan.slots), num_context=steady.num_context)
            self._flights.append(_Flight(report.step, plan.generation, plan.slots, contents))
            steady.num_context += len(plan.slots)
            table.num_computed += steady.one_each
            table.num_known += steady.one_each
            steady.num_plans -= 1
            return
        self._steady = None
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
        self._flights.append(_Flight(report.step, plan.generation, slots, contents, drafted))
        for row in num_cached.nonzero()[0].tolist():
            lives.note_begun(int(slots[row]), int(num_cached[row]))
        if np.count_nonzero(granted > 1):
            lives.note_computed(slots.tolist(), granted)
        for row in (table.num_computed[slots] == 0).nonzero()[0].tolist():
            self._note_found(int(slots[row]), int(num_cached[row]))
        progress = np.where(table.is_running[slots], granted + num_cached, 0)
        table.num_computed[slots] += progress
        is_sampled = plan.reaches_end[rows] & (progress == wanted)
        table.num_known[slots] += is_sampled

    def _note_found(self, slot: int, num_cached: int) -> None:
        """What was found of a prompt that begins, if it was not known before."""
        sequence = self.slots.sequences[slot]
        if sequence is not None and not sequence.num_expected_cached and not sequence.num_preempted:
            self._found.note(len(sequence.token_ids), num_cached)

    def _pop_flight(self, step: int) -> _Flight:
        flight = self._flights.popleft()
        assert flight.step == step, f"step {step} is done before step {flight.step}"
        self.completed_step = step
        self._must_wait = False
        return flight

    def _find_guilty(self, flight: _Flight) -> list[Sequence]:
        """The sequence that made the step fail, once that is beyond doubt: it was alone, and not for the first time."""
        sequence = self.slots.sequences[int(flight.slots[0])] if len(flight.slots) == 1 else None
        if sequence is None or sequence.state is State.OVER:
            return []
        sequence.num_voids_alone += 1
        return [sequence] if sequence.num_voids_alone >= MAX_VOIDS_ALONE else []

    def _blocks(self, num_tokens: Ints) -> Ints:
        return -(-num_tokens // self.limits.block_size)

    def check(self) -> None:
        """Raises AssertionError unless every sequence is in exactly one place, and every step accounted for."""
        self.lives.check()
        assert 0 <= self.num_in_flight <= self.limits.steps_in_flight
        assert len(self._flights) == self.num_in_flight
