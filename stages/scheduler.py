"""Decides what the next step should run. By priority, then first come, first served; decodes before prefills.

Plain code behind the schedule stage. Knows sequences and steps; refuses to know blocks (allocate does), clocks, and the
event loop. Told the same things in the same order, it decides the same.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

from .errors import Failed, RequestError
from .messages import Bools, Indices, Ints, PlanReport, Started, StepDone, StepPlan, StepVoid, TokenRequest
from .sequences import Sequence, SlotTable, State, WaitingQueue, choice_seed

MAX_PRIORITY = 1 << 31
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


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A granted step that is not done yet."""

    step: int
    generation: int
    slots: Indices  # of the rows it runs


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """The running slots in the order of service, and who may be preempted for whom. Changes only with membership."""

    slots: Indices  # [R]
    victims: Indices  # [V] newest first
    num_victims: Ints  # [S] by slot: how many of them it may take
    has_reserves: bool  # whether any of them is to have all its blocks at once

    @classmethod
    def of(cls, table: SlotTable) -> _Order:
        slots = table.running()
        is_victim = table.reserve[slots] == 0
        is_victim[:1] = False  # the first in line is never preempted
        behind = np.cumsum(is_victim[::-1])[::-1] - is_victim
        num_victims = np.zeros(table.num_slots, np.int32)
        num_victims[slots] = behind
        has_reserves = bool(np.count_nonzero(table.reserve[slots]))
        return cls(slots, slots[is_victim][::-1].copy(), num_victims, has_reserves)


@dataclass(slots=True, eq=False)
class _Steady:
    """What a plan of decoding rows says, again and again, until a row comes or goes: each row wants one token."""

    order: _Order  # it holds for
    num_wanted: Ints  # [R] ones
    reaches_end: Bools  # [R] all true
    num_victims: Ints  # [R]
    num_reserved: Ints | None  # [R]
    one_each: Ints  # [S] by slot: ones for the rows, zeros elsewhere
    num_plans: int  # for which it still holds: the fewest tokens that any row may yet make

    @classmethod
    def of(cls, order: _Order, table: SlotTable, num_wanted: Ints) -> _Steady:
        slots = order.slots
        num_plans = int((table.limit[slots] - table.num_known[slots]).min())
        reaches_end = np.ones(len(slots), np.bool_)
        reserves = table.reserve[slots] if order.has_reserves else None
        one_each = table.is_running.astype(np.int32)
        return cls(order, num_wanted, reaches_end, order.num_victims[slots], reserves, one_each, num_plans)


class Scheduler:
    """Holds every sequence from its arrival to its end, and makes one plan at a time.

    Call `add`, `on_report`, `on_done`, `on_void` and `end` as things happen, then `plan` until it returns None. A plan
    is outstanding until its report; at most K granted steps are in flight.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.sequences: dict[int, Sequence] = {}
        self.waiting = WaitingQueue()
        self.slots = SlotTable(limits.max_num_seqs)
        self.preemptions: Counter[tuple[str, str]] = Counter()  # (how: swap or recompute, for what: blocks or slot)
        self.num_recomputed_tokens = 0  # computed once more
        self.num_swapped = 0  # sequences that wait to come back from the host
        self.admission_blocked_reason = ""  # what the first in line lacks: "blocks", or "swapped" if it is swapped out
        self.last_granted = -1  # step
        self.completed_step = -1
        self._told_step = -1  # the completed step that allocate was last told of
        self._generation = 0
        self._outstanding: StepPlan | None = None
        self._flights: deque[_Flight] = deque()
        self._order: _Order | None = None  # None: membership changed
        self._steady: _Steady | None = None  # None, or of another order: rows are to be looked at
        self._started: list[Started] = []  # to tell allocate in the next plan, as the next six
        self._ended: list[int] = []
        self._preempted: list[int] = []
        self._dropped: list[int] = []
        self._discarded: list[int] = []  # sequence ids
        self._settled: list[StepDone] = []
        self._voided: list[int] = []
        self._num_returning = 0  # preempted sequences that have not come back to the queue yet
        self._row_limit = limits.max_num_seqs  # lowered when steps fail, until the one at fault is alone
        self._num_free_blocks: int | None = None  # as of the last report
        self._num_quarantined = 0
        self._num_host_quarantined = 0
        self._must_wait = False  # nothing could be granted: plan again when a step is done

    # -- asking

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
    def num_waiting(self) -> int:
        """Sequences that wait to run, but for swapped ones."""
        return len(self.waiting) + self._num_returning - self.num_swapped

    @property
    def num_preemptions(self) -> int:
        return self.preemptions.total()

    @property
    def num_running(self) -> int:
        return self.slots.num_running

    # -- being told

    def add(self, request: TokenRequest) -> None:
        """A prompt arrived; its choices wait from now on. Adding it twice changes nothing."""
        params = request.params
        num_prompt = len(request.token_ids)
        room = self.limits.max_model_len - num_prompt
        answer = room if params.max_tokens is None else min(params.max_tokens, room)
        for choice in range(params.n):
            sequence_id = request.first_sequence_id + choice
            if sequence_id in self.sequences:
                continue
            sequence = Sequence(
                sequence_id,
                request.request_id,
                request.token_ids,
                num_prompt,
                num_prompt + answer,
                params,
                choice_seed(params.seed or 0, choice),
                request.priority,
                request.cache_salt,
            )
            self.sequences[sequence_id] = sequence
            self.waiting.push(sequence)

    def end(self, sequence_id: int) -> None:
        """A sequence is over, wherever it is: finished, stopped or cancelled. Unknown ids are over already."""
        sequence = self.sequences.pop(sequence_id, None)
        if sequence is None:
            return
        before = sequence.state
        self._discard(sequence)
        sequence.move(State.OVER)
        if before in (State.WAITING, State.SWAPPED):
            self.waiting.forget()
        elif before is State.RUNNING:
            self._leave(sequence)
            self._ended.append(sequence.slot)
        else:
            self._num_returning -= 1

    def on_report(self, report: PlanReport) -> None:
        """Allocate's answer to the outstanding plan."""
        plan, self._outstanding = self._outstanding, None
        assert plan is not None and report.step == plan.step, f"a report of step {report.step} was not asked for"
        self._num_free_blocks, self._num_quarantined = report.num_free, report.num_quarantined
        self._num_host_quarantined = report.num_host_quarantined
        if report.is_reset:
            self._take_back(self.slots.running(), tell=False)
            self._give_up_swapped(-1)
            return
        if report.is_void:
            self._must_wait = len(plan.slots) > 0 and self.num_in_flight > 0
        else:
            self._note_grant(plan, report)
        for slot in report.preempted:
            self._note_preempted(slot, "blocks")
        for slot in (*plan.preempted, *report.preempted):
            self._note_way(slot, report, plan)

    def on_done(self, done: StepDone) -> None:
        """A step's tokens are known."""
        self._pop_flight(done.step)
        self._row_limit = min(self.limits.max_num_seqs, 2 * self._row_limit)
        known = self.slots.knows(done.slots, done.sequence_ids)
        if np.count_nonzero(known) < len(known):
            done = StepDone(
                done.step,
                done.slots[known],
                done.sequence_ids[known],
                done.places[known],
                done.token_ids[known],
                done.is_finished[known],
            )
        self.slots.note_tokens(done.slots, done.places, done.token_ids)
        self._settled.append(done)
        if np.count_nonzero(done.is_finished):
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
        self._take_back(slots[self.slots.is_running[slots]], tell=True)
        self._give_up_swapped(void.step)
        for sequence in guilty:
            self.end(sequence.sequence_id)
        return [(sequence, Failed("the model failed on this request")) for sequence in guilty]

    def rebuild(self) -> None:
        """After a crash: trusts nothing about what runs or is swapped out, and computes it all anew."""
        self._take_back(self.slots.running(), tell=True)
        self._give_up_swapped(-1)

    # -- planning

    def plan(self) -> StepPlan | None:
        """The next plan, or None while there is nothing to say or nobody to say it to."""
        if self._outstanding is not None or self.num_in_flight >= self.limits.steps_in_flight:
            return None
        self._settle()
        if self._must_wait:
            return None
        if len(self.waiting) and not self.slots.num_free:
            self._make_way()
        slots, num_wanted = self._rows()
        if len(self.waiting) and self._admit(int(num_wanted.sum())):
            slots, num_wanted = self._rows()
        if not len(slots) and not self._has_news():
            return None
        self._outstanding = self._make_plan(slots, num_wanted)
        self._told_step = self.completed_step
        return self._outstanding

    def _has_news(self) -> bool:
        """Whether allocate could free something if it knew what has happened since the last plan."""
        if self._ended or self._preempted or self._dropped or self._discarded:
            return True
        is_settling = self._num_quarantined > 0 or self._num_host_quarantined > 0
        return is_settling and self.completed_step > self._told_step

    def _rows(self) -> tuple[Indices, Ints]:
        """The rows to ask for, decodes first, each group in the order of service: (slots, tokens wanted)."""
        order = self._in_order()
        slots, steady = order.slots, self._steady
        if steady is not None and steady.order is order and steady.num_plans > 0 and len(slots) <= self._row_limit:
            return slots, steady.num_wanted
        num_left = self.slots.num_known[slots] - self.slots.num_computed[slots]
        is_runnable = self.slots.num_known[slots] < self.slots.limit[slots]
        is_decode = is_runnable & (num_left == 1)
        if 0 < len(slots) <= self._row_limit and is_decode.all():
            self._steady = _Steady.of(order, self.slots, num_left)
            return slots, num_left
        self._steady = None
        is_prefill = is_runnable & (num_left > 1)
        rows = np.concatenate([slots[is_decode], slots[is_prefill]])
        wanted = np.concatenate([num_left[is_decode], num_left[is_prefill]])
        return rows[: self._row_limit], wanted[: self._row_limit]

    def _make_way(self) -> None:
        """Takes slots from running sequences for strictly better ones that wait; the worst give way first. They are
        admitted once no step in flight knows the slots any more."""
        running = self._in_order().slots
        worst = int(self.slots.priority[running].max(initial=-MAX_PRIORITY))
        first = self.waiting.peek()
        if first is None or first.priority >= worst:
            return
        better = sorted(sequence.priority for sequence in self.waiting if sequence.priority < worst)
        better = better[self.slots.num_leaving :]  # the others have slots on their way to them
        for slot in running[::-1].tolist():
            victim = self.slots.sequences[slot]
            assert victim is not None
            if not better or better[0] >= victim.priority:
                return
            if not victim.is_protected:
                del better[0]
                self._preempted.append(slot)
                self._note_preempted(slot, "slot")

    def _is_better_than_running(self, sequence: Sequence) -> bool:
        return sequence.priority < int(self.slots.priority[self._in_order().slots].max(initial=-MAX_PRIORITY))

    def _admit(self, num_wanted: int) -> bool:
        """Gives slots to those that wait, in order, while tokens, slots and blocks are likely to be there. Whether
        anybody got one."""
        first = self.waiting.peek()
        self.admission_blocked_reason = ""
        if first is None or self._num_returning or not self.slots.num_free:
            return False
        budget = self.limits.max_num_batched_tokens - num_wanted
        spare, num_before = self._spare_blocks(), self.num_running
        while first is not None and self.slots.num_free and budget > 0 and self.num_running < self._row_limit:
            need = -(-max(len(first.token_ids) + 1, first.limit if first.is_protected else 0) // self.limits.block_size)
            is_tight = spare is not None and need > spare and self.num_running > 0
            if is_tight and not self._is_better_than_running(first):  # else it may take what it lacks
                self.admission_blocked_reason = "swapped" if first.num_swapped else "blocks"
                break
            budget -= len(first.token_ids) - first.num_swapped
            self._start(self.waiting.pop())
            spare = None if spare is None else spare - need - 1
            first = self.waiting.peek()
        return self.num_running > num_before

    def _spare_blocks(self) -> int | None:
        """Blocks likely to be left when every running sequence has what it needs now and one more each; None before the
        first report. A guess that only keeps the newest from being let in to be preempted at once."""
        if self._num_free_blocks is None:
            return None
        slots = self._in_order().slots
        owed = self._blocks(self.slots.num_known[slots]) - self._blocks(self.slots.num_computed[slots])
        return self._num_free_blocks + self._num_quarantined - int(owed.sum()) - len(slots)

    def _start(self, sequence: Sequence) -> None:
        self.num_swapped -= sequence.state is State.SWAPPED
        sequence.move(State.RUNNING)
        self.slots.enter(sequence)
        self._started.append(sequence.started())
        self._order = None

    def _make_plan(self, slots: Indices, num_wanted: Ints) -> StepPlan:
        order, steady = self._in_order(), self._steady
        is_steady = steady is not None and num_wanted is steady.num_wanted
        if steady is not None and is_steady:
            reaches_end, num_victims, num_reserved = steady.reaches_end, steady.num_victims, steady.num_reserved
        else:
            reaches_end, num_victims = np.ones(len(slots), np.bool_), order.num_victims[slots]
            num_reserved = self.slots.reserve[slots] if order.has_reserves else None
        plan = StepPlan(
            step=self.last_granted + 1,
            generation=self._generation,
            completed_step=self.completed_step,
            slots=slots,
            num_wanted=num_wanted,
            reaches_end=reaches_end,
            token_budget=self.limits.max_num_batched_tokens,
            victims=order.victims,
            num_victims=num_victims,
            num_reserved=num_reserved,
            is_decode=is_steady,
            allows_partial=self.limits.enable_chunked_prefill,
            started=tuple(self._started),
            ended=self._ended,
            preempted=self._preempted,
            dropped=self._dropped,
            discarded=self._discarded,
            settled=self._settled,
            voided=self._voided,
        )
        self._started, self._ended, self._settled, self._voided = [], [], [], []
        self._preempted, self._dropped, self._discarded = [], [], []
        return plan

    # -- books

    def _note_grant(self, plan: StepPlan, report: PlanReport) -> None:
        self.last_granted = report.step
        steady, table = self._steady, self.slots
        if steady is not None and report.num_granted is steady.num_wanted and steady.order is self._order:
            self._flights.append(_Flight(report.step, plan.generation, plan.slots))
            table.last_step[plan.slots] = report.step
            table.num_computed += steady.one_each
            table.num_known += steady.one_each
            steady.num_plans -= 1
            return
        self._steady = None
        rows = np.flatnonzero(report.num_granted)
        slots = plan.slots[rows]
        self._flights.append(_Flight(report.step, plan.generation, slots))
        table.last_step[slots] = report.step
        num_cached = report.num_cached[rows]
        for row in np.flatnonzero(num_cached).tolist():
            self._note_begun(int(slots[row]), int(num_cached[row]))
        if np.count_nonzero(report.num_granted[rows] > 1):
            self._count_recomputed(slots, report.num_granted[rows])
        progress = np.where(table.is_running[slots], report.num_granted[rows] + num_cached, 0)
        table.num_computed[slots] += progress
        is_sampled = plan.reaches_end[rows] & (progress == plan.num_wanted[rows])
        table.num_known[slots] += is_sampled

    def _count_recomputed(self, slots: Indices, num_granted: Ints) -> None:
        for slot, count in zip(slots.tolist(), num_granted.tolist(), strict=True):
            sequence = self.slots.sequences[slot]
            if sequence is not None and sequence.num_lost:
                num_again = min(count, sequence.num_lost)
                sequence.num_lost -= num_again
                self.num_recomputed_tokens += num_again

    def _note_begun(self, slot: int, num_cached: int) -> None:
        sequence = self.slots.sequences[slot]
        if sequence is not None:
            sequence.num_swapped = 0
            sequence.num_lost -= min(num_cached, sequence.num_lost)

    def _note_preempted(self, slot: int, cause: str) -> None:
        sequence = self.slots.sequences[slot]
        if sequence is None or sequence.state is not State.RUNNING:
            return  # it ended while allocate was taking its blocks
        sequence.num_preempted += 1
        sequence.lost_for = cause
        sequence.num_lost += int(self.slots.num_computed[slot])
        self._return(sequence)

    def _note_way(self, slot: int, report: PlanReport, plan: StepPlan) -> None:
        """Whether what a preempted sequence had is on the host now. The slot is not anybody else's before the next
        plan."""
        sequence = self.slots.sequences[slot]
        num_swapped = report.swapped.get(slot, 0)
        if sequence is None:
            return
        is_swapped = num_swapped > 0 and sequence.state is State.PREEMPTED and plan.generation == self._generation
        if is_swapped:
            sequence.num_swapped, sequence.swapped_step = num_swapped, report.step
        elif num_swapped:  # it ended, or the step that copies has fallen
            self._discarded.append(sequence.sequence_id)
        if sequence.lost_for:
            self.preemptions["swap" if is_swapped else "recompute", sequence.lost_for] += 1
            sequence.lost_for = ""

    def _discard(self, sequence: Sequence) -> None:
        """What it has on the host is of no use any more."""
        if sequence.num_swapped:
            self._discarded.append(sequence.sequence_id)
            sequence.num_swapped = 0
            self.num_swapped -= sequence.state is State.SWAPPED

    def _give_up_swapped(self, void_step: int) -> None:
        """What was to be copied to the host in `void_step` or later is not there."""
        for sequence in self.sequences.values():
            if sequence.num_swapped and sequence.swapped_step >= void_step:
                self._discard(sequence)
                if sequence.state is State.SWAPPED:
                    sequence.move(State.WAITING)

    def _take_back(self, slots: Indices, *, tell: bool) -> None:
        """Sends running sequences back to the queue without counting it as their preemption."""
        for slot in slots.tolist():
            sequence = self.slots.sequences[slot]
            assert sequence is not None
            self._return(sequence)
            if tell:
                self._dropped.append(slot)

    def _return(self, sequence: Sequence) -> None:
        sequence.move(State.PREEMPTED)
        self._num_returning += 1
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        last_step = int(self.slots.last_step[sequence.slot])
        if self._outstanding is not None and sequence.slot in self._outstanding.slots:
            last_step = self._outstanding.step
        self.slots.leave(sequence.slot, last_step)
        self._started = [started for started in self._started if started.slot != sequence.slot]
        self._order = None

    def _settle(self) -> None:
        for sequence in self.slots.settle(self.completed_step, self.last_granted):
            sequence.move(State.SWAPPED if sequence.num_swapped else State.WAITING)
            self.num_swapped += sequence.state is State.SWAPPED
            self._num_returning -= 1
            self.waiting.push(sequence)

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

    def _in_order(self) -> _Order:
        if self._order is None:
            self._order = _Order.of(self.slots)
        return self._order

    def _blocks(self, num_tokens: Ints) -> Ints:
        return -(-num_tokens // self.limits.block_size)

    def check(self) -> None:
        """Raises AssertionError unless every sequence is in exactly one place (I10: and none is left at the end)."""
        in_slots = [s for s in self.slots.sequences if s is not None and s.state is not State.OVER]
        running = [s for s in in_slots if s.state is State.RUNNING]
        waiting = list(self.waiting)
        assert len(running) == self.num_running, f"{len(running)} sequences run, the table says {self.num_running}"
        assert len(in_slots) - len(running) == self._num_returning
        num_swapped = sum(s.state is State.SWAPPED for s in waiting)
        assert num_swapped == self.num_swapped, f"{num_swapped} sequences are swapped, the counter says otherwise"
        assert all(s.num_swapped > 0 for s in waiting if s.state is State.SWAPPED), "swapped, with nothing on the host"
        assert {s.sequence_id for s in in_slots}.isdisjoint(s.sequence_id for s in waiting)
        assert len(in_slots) + len(waiting) == len(self.sequences), "a sequence is in no place, or in two"
        assert 0 <= self.num_in_flight <= self.limits.steps_in_flight
        assert len(self._flights) == self.num_in_flight
