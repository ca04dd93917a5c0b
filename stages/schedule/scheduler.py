"""Tracks steps (planned, granted, done or void) and assembles each plan.

Plain code behind the schedule stage, without clock or event loop: the same calls in the same order give the same
plans. `planner.py` chooses the rows of a step, `policy.py` ranks sequences, `lifecycle.py` moves them between states.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...kernels.layout.kv_layout import KVLayout
from ..array_checks import num_true
from ..errors import Failed, RequestError
from ..messages import NO_INDICES, Drafts, Guess, Indices, PlanReport, StepDone, StepPlan, StepVoid, TokenRequest
from .admitter import Admitter
from .lifecycle import SequenceLifecycle
from .planner import Planner, StepInFlight
from .policy import Policy
from .sequence import Sequence, State
from .service_order import SteadyDemand, TokenDemand
from .speculation import Speculation
from .step_timing.step_budget import StepBudget
from .step_timing.step_time_model import StepContents, StepTimeModel

MAX_VOIDS_ALONE = 2  # steps that may fail with this sequence alone in them, before it fails for good
NO_DRAFTS: Mapping[int, int] = {}
LOAD_FAILED = "adapter_load_failed"  # code of the error
LOAD_FAILED_TEXT = "the adapter of this request could not be loaded to the device; the server's log has the reason"


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of the scheduler, from the configuration."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    steps_in_flight: int = 2  # K
    enable_chunked_prefill: bool = True
    itl_target_ms: float = 0.0  # target time of a step with decodes; 0: none
    num_speculative_tokens: int = 0  # drafts per step, at most; 0: speculation is off
    short_length: int = 0  # tokens of a sequence beyond which it has other rotary factors; 0: never
    max_loras: int = 0  # adapters on the device at once; 0: none are served
    kv_layout: KVLayout | None = None  # of a cache of several kinds
    num_lanes: int = 1  # ranks that compute the layers of a step one after another: see `Lanes`

    @property
    def max_steps_per_row(self) -> int:
        """Steps in flight that choose a token of one sequence. The first of several ranks must know it."""
        return self.steps_in_flight if self.num_lanes == 1 else 1


class Scheduler:
    """Holds every sequence from its arrival to its end, and makes one plan at a time.

    Call `add`, `on_report`, `on_done`, `on_void`, `take_guess`, `end`, `park` and `unpark` as things happen, then
    `plan` until it returns None. A plan is outstanding until its report. At most K granted steps are in flight. Step
    numbers start at `first_step`, which is where a restarted engine continues.
    """

    def __init__(self, limits: StepLimits, policy: Policy | None = None, first_step: int = 0) -> None:
        self.limits = limits
        self.policy = policy or Policy()
        self.lifecycle = SequenceLifecycle(limits.max_num_seqs, self.policy, limits.short_length, limits.max_loras)
        self.adapters = self.lifecycle.adapters
        self.slots = self.lifecycle.slots
        self.waiting = self.lifecycle.waiting
        self.last_granted = first_step - 1  # number of the last granted step
        self.completed_step = first_step - 1
        self._reported_step = first_step - 1  # the `completed_step` of the last plan
        self._generation = 0
        self._outstanding: StepPlan | None = None
        self._flights: deque[StepInFlight] = deque()
        self._report: PlanReport | None = None  # the last one
        self._must_wait = False  # nothing could be granted: plan again after the next step
        self._row_limit = limits.max_num_seqs  # halved when steps fail, until the faulty sequence is alone
        self._completed: list[StepDone] = []  # for the next plan, like the next line
        self._voided: list[int] = []
        target_s, most = limits.itl_target_ms / 1e3, limits.max_num_batched_tokens
        self.costs = StepTimeModel() if target_s else None  # of steps; None: they are not learned
        # A row gets a token each `num_lanes` steps, so a step has that share of the target. None: always `most`.
        self._step_size = StepBudget(target_s / limits.num_lanes, most, self.costs) if target_s else None
        most_each = limits.block_size - 1  # prefix cache reads at most one block of tokens per sequence and step
        self.speculation = Speculation(limits.num_speculative_tokens, most_each, limits.max_steps_per_row)
        self._admitter = Admitter(
            self.lifecycle, limits.block_size, limits.kv_layout, splits_prompts=limits.enable_chunked_prefill
        )
        sizes = (self._step_size, most, limits.num_lanes)
        self._planner = Planner(self.lifecycle, self._admitter, self.speculation, *sizes)

    # -- state

    @property
    def sequences(self) -> dict[int, Sequence]:
        """All sequences that have not ended, by id."""
        return self.lifecycle.sequences

    @property
    def num_in_flight(self) -> int:
        """Steps granted and not yet done."""
        return self.last_granted - self.completed_step

    @property
    def has_credit(self) -> bool:
        """Whether a step may be planned: no plan is outstanding, fewer than K steps are in flight."""
        return self._outstanding is None and self.num_in_flight < self.limits.steps_in_flight

    @property
    def has_last_credit(self) -> bool:
        """Whether exactly one more step may be planned now."""
        return self._outstanding is None and self.num_in_flight == self.limits.steps_in_flight - 1

    @property
    def expected_s(self) -> float:
        """Expected duration of the running step in seconds; 0 if none runs or it is unknown."""
        running, step_size = self._flights[0] if self._flights else None, self._step_size
        if running is None or step_size is None or running.contents is None or running.generation != self._generation:
            return 0.0
        return step_size.expected_s(running.contents)

    def learn_costs(self) -> None:
        """Learns what steps cost, if it does not yet."""
        self.costs = self.costs or StepTimeModel()

    @property
    def is_asking(self) -> bool:
        """Whether a plan with rows is outstanding."""
        return self._outstanding is not None and len(self._outstanding.slots) > 0

    @property
    def may_plan_after_report(self) -> bool:
        """Whether a credit may be left once the outstanding plan is granted, and rows that may use it.

        If not, a step in flight must finish before the next plan, whatever the report says.
        """
        if self.num_in_flight == 0:
            return True
        if self._outstanding is None or self.num_in_flight + 1 >= self.limits.steps_in_flight:
            return self.num_in_flight + 1 < self.limits.steps_in_flight
        return self._planner.leaves_rows(self._outstanding.slots, self._flights)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot, parked ones included."""
        return self.slots.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to run, swapped ones excluded."""
        return self.num_queued + (0 if self.adapters is None else len(self.adapters))

    @property
    def num_queued(self) -> int:
        """As `num_waiting`, without those that wait for their adapter."""
        return len(self.waiting) + self.lifecycle.num_returning - self.lifecycle.num_swapped

    @property
    def waiting_for(self) -> str:
        """What the first waiting sequence lacks.

        "slots" or "blocks"; "swapped" if it lacks blocks to be copied back from the host; "adapter" if no sequence
        waits but for its adapter; "step" if it is only not its turn yet; "" if no sequence waits.
        """
        if self.lifecycle.num_returning:
            return "blocks"
        if not len(self.waiting):
            return "adapter" if self.adapters is not None and len(self.adapters) else ""
        return self.admission_blocked_reason or ("step" if self.slots.num_free else "slots")

    @property
    def admission_blocked_reason(self) -> str:
        """What the first waiting sequence lacked last: "blocks", or "swapped" if swapped out."""
        return self._admitter.blocked_reason

    @property
    def num_swapped(self) -> int:
        """Sequences that wait with blocks on the host."""
        return self.lifecycle.num_swapped

    @property
    def num_parked(self) -> int:
        """Sequences that are parked, as their clients do not read."""
        return self.lifecycle.num_parked

    @property
    def is_idle(self) -> bool:
        """Whether every sequence is parked, or there is none."""
        return len(self.sequences) == self.num_parked

    @property
    def step_token_budget(self) -> int:
        """The token budget of the last step that mixed prefills and decodes."""
        return self.limits.max_num_batched_tokens if self._step_size is None else self._step_size.last

    @property
    def preemptions(self) -> Counter[tuple[str, str]]:
        """Number of preemptions by (method: swap or recompute, cause: blocks, slot, adapter or rope)."""
        return self.lifecycle.preemptions

    @property
    def num_preemptions(self) -> int:
        return self.preemptions.total()

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens computed again after a preemption."""
        return self.lifecycle.num_recomputed_tokens

    # -- events

    def add(self, request: TokenRequest) -> None:
        """Adds the choices of a new prompt to the waiting queue.

        Adding a prompt again has no effect.
        """
        if request.adapter is not None and self.adapters is not None:
            self.adapters.slots.pin(request.adapter.pinned)
        self.lifecycle.add(request, self.limits.max_model_len)

    def end(self, sequence_id: int) -> None:
        """Ends a sequence in any state: finished, stopped or cancelled.

        Ignores unknown ids, which have ended.
        """
        self.lifecycle.end(sequence_id)

    def park(self, sequence_id: int) -> None:
        """Parks a sequence whose client does not read: it is not served, and preempted first.

        Ignores unknown ids.
        """
        self.lifecycle.park(sequence_id)

    def unpark(self, sequence_id: int) -> None:
        """Unparks a sequence: its client reads again. Ignores unknown ids."""
        self.lifecycle.unpark(sequence_id)

    def on_report(self, report: PlanReport) -> None:
        """Takes allocate's report on the outstanding plan."""
        plan, self._outstanding, self._report = self._outstanding, None, report
        assert plan is not None and report.step == plan.step, f"no plan of step {report.step} is outstanding"
        if report.is_reset:
            self.lifecycle.take_back(self.slots.running().tolist(), reports_dropped=False)
            self.lifecycle.give_up_swapped(-1)
            return
        if report.is_void:
            self._must_wait = len(plan.slots) > 0 and self.num_in_flight > 0
        else:
            self._note_grant(plan, report)
        for slot in report.preempted:
            self.lifecycle.note_preempted(slot, "blocks")
        for slot in (*plan.preempted, *report.preempted):
            self.lifecycle.note_swap_outcome(slot, report, is_void=plan.generation != self._generation)

    def on_done(self, done: StepDone) -> list[tuple[Sequence, RequestError]]:
        """Takes the outcome of a completed step.

        Returns the sequences that fail, with the error for their clients: those that waited for an adapter which the
        step could not load.
        """
        flight = self._pop_flight(done.step)
        unserved = [] if self.adapters is None else self.adapters.note_done(done.step, done.failed_loads)
        for sequence in unserved:
            self.end(sequence.sequence_id)
        if self.costs is not None and flight.contents is not None and done.took_us:
            self.costs.note(flight.contents, done.took_us / 1e6)
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
        self._completed.append(done)
        for slot, num_drafts in flight.drafted.items():
            self._note_drafts(slot, num_drafts, int(np.count_nonzero(done.slots == slot)))
        if num_true(done.is_finished):
            for sequence_id in done.sequence_ids[done.is_finished].tolist():
                self.end(sequence_id)
        return [(sequence, Failed(LOAD_FAILED_TEXT, code=LOAD_FAILED)) for sequence in unserved]

    def on_void(self, void: StepVoid) -> list[tuple[Sequence, RequestError]]:
        """Takes a void step: everything in flight is recomputed, in smaller steps.

        Returns the sequences that fail, with the error for their clients.
        """
        flight = self._pop_flight(void.step)
        self._voided.append(void.step)
        if self.adapters is not None:
            self.adapters.note_void(void.step)
        if void.generation != self._generation:
            return []  # voided by an earlier step, which was handled then
        self._generation += 1
        self._row_limit = max(1, len(flight.slots) // 2)
        suspects = self._find_suspects(flight)
        plans = [flight.slots, *(later.slots for later in self._flights)]
        if self._outstanding is not None:
            plans.append(self._outstanding.slots)
        slots = np.unique(np.concatenate(plans))
        self.lifecycle.take_back(slots[self.slots.is_running[slots]].tolist(), reports_dropped=True)
        self.lifecycle.give_up_swapped(void.step)
        for sequence in suspects:
            self.end(sequence.sequence_id)
        return [(sequence, Failed("the model failed on this request")) for sequence in suspects]

    def rebuild(self) -> None:
        """After a crash: recomputes all running and swapped sequences, trusting no block."""
        self.lifecycle.take_back(self.slots.running().tolist(), reports_dropped=True)
        self.lifecycle.give_up_swapped(-1)

    # -- drafts

    def slots_to_guess(self) -> list[int]:
        """Slots for which a draft is worth its time.

        NOTE: must change no state, as a replay does not call it.
        """
        if not self.speculation.num_watched:
            return []
        return self.speculation.due(self.slots, {slot for flight in self._flights for slot in flight.slots.tolist()})

    def take_guess(self, guess: Guess) -> None:
        """Takes draft tokens for a sequence."""
        self.speculation.take(guess, self.slots)
        if self.speculation.is_drafting:
            self._planner.refresh_rows()

    def _note_drafts(self, slot: int, num_drafts: int, num_new: int) -> None:
        """Counts accepted drafts: all new tokens but the first, which was counted when granted."""
        num_accepted = max(0, num_new - 1)
        self.speculation.note(slot, num_drafts, num_accepted)
        if num_accepted and self.slots.is_running[slot]:
            self.slots.num_known[slot] += num_accepted
            self.slots.num_computed[slot] += num_accepted
            self.lifecycle.updates.accepted.append((slot, num_accepted))

    # -- planning

    def plan(self) -> StepPlan | None:
        """The next plan; None without a credit, or if there is nothing to run and nothing to report."""
        if not self.has_credit:
            return None
        self.lifecycle.free_slots(self.completed_step, self.last_granted)
        if self._must_wait:
            return None
        if self.adapters is not None and self.adapters.needs_advance:
            self._admitter.preempt_for_adapters()
            self._admitter.serve_adapter_lines(self.completed_step, self.last_granted)
        demands, drafts, token_budget = self._planner.choose(self._flights, self._report, self._row_limit)
        if self.adapters is not None and self.adapters.has_news:
            has_ready = self._admitter.serve_adapter_lines(self.completed_step, self.last_granted)
            if has_ready and not len(demands.slots):
                demands, drafts, token_budget = self._planner.choose(self._flights, self._report, self._row_limit)
        if not len(demands.slots) and not self._has_updates():
            return None
        self._outstanding = self._make_plan(demands, drafts, token_budget)
        self.slots.last_step[demands.slots] = self._outstanding.step
        self._reported_step = self.completed_step
        return self._outstanding

    def _has_updates(self) -> bool:
        """Whether allocate could free blocks if it knew what has happened since the last plan."""
        if self.lifecycle.updates.can_free or (self.adapters is not None and self.adapters.slots.has_loads):
            return True
        report = self._report
        has_quarantined = report is not None and report.num_quarantined + report.num_host_quarantined > 0
        return has_quarantined and self.completed_step > self._reported_step

    def _make_plan(self, demands: TokenDemand, drafts: Drafts | None, token_budget: int) -> StepPlan:
        updates = self.lifecycle.take_updates()
        completed, self._completed = self._completed, []
        voided, self._voided = self._voided, []
        return StepPlan(
            step=self.last_granted + 1,
            generation=self._generation,
            completed_step=self.completed_step,
            slots=demands.slots,
            num_wanted=demands.num_wanted if drafts is None else demands.num_wanted + drafts.counts,
            reaches_end=demands.reaches_end,
            token_budget=token_budget,
            victims=demands.victims,
            num_victims=demands.num_victims,
            num_reserved=demands.num_reserved,
            is_decode=isinstance(demands, SteadyDemand),
            allows_partial=self.limits.enable_chunked_prefill,
            drafts=drafts,
            accepted=updates.accepted,
            started=tuple(updates.started),
            ended=updates.ended,
            preempted=updates.preempted,
            dropped=updates.dropped,
            discarded=updates.discarded,
            settled=completed,
            voided=voided,
            adapter_loads=() if self.adapters is None else self.adapters.slots.loads(),
        )

    # -- outcomes

    def _note_grant(self, plan: StepPlan, report: PlanReport) -> None:
        self.last_granted = report.step
        if plan.adapter_loads and self.adapters is not None:
            self.adapters.slots.note_granted(plan.adapter_loads, report.step)
        table, lifecycle = self.slots, self.lifecycle
        steady = self._planner.steady_if_granted(report)
        if steady is not None:
            contents = None
            if self.costs is not None:
                contents = StepContents(num_decode=len(plan.slots), num_context=steady.num_context)
            self._flights.append(
                StepInFlight(report.step, plan.generation, plan.slots, contents, NO_DRAFTS, plan.slots, True)
            )
            steady.note_granted(table)
            return
        slots, granted, num_cached = plan.slots, report.num_granted, report.num_cached
        wanted, drafted = plan.num_wanted, {}
        rows: Indices | slice = slice(None)
        if granted is not wanted:
            rows = granted.nonzero()[0]
            slots, granted, num_cached, wanted = slots[rows], granted[rows], num_cached[rows], wanted[rows]
        if plan.drafts is not None:  # a row with drafts is granted all of them, or only its own token
            counts = plan.drafts.counts[rows]
            wanted = wanted - counts
            more = (granted - wanted) * (counts > 0)
            drafted = {slot: count for slot, count in zip(slots.tolist(), more.tolist(), strict=True) if count}
            granted = np.minimum(granted, wanted)
        contents = None
        if self.costs is not None:
            starts = table.num_computed[slots] + num_cached
            contents = StepContents.of(starts, granted, num_drafts=sum(drafted.values()))
        awaited, has_decodes = NO_INDICES, False
        if self.limits.max_steps_per_row == 1:
            gets_token = plan.reaches_end[rows] & (granted + num_cached == wanted)
            awaited, has_decodes = slots[gets_token], bool(np.count_nonzero(gets_token & (wanted == 1)))
        self._flights.append(StepInFlight(report.step, plan.generation, slots, contents, drafted, awaited, has_decodes))
        for row in num_cached.nonzero()[0].tolist():
            lifecycle.note_started(int(slots[row]), int(num_cached[row]))
        if num_true(granted > 1):
            lifecycle.note_computed(slots.tolist(), granted)
        for row in (table.num_computed[slots] == 0).nonzero()[0].tolist():
            self._admitter.note_cached(int(slots[row]), int(num_cached[row]))
        progress = (granted + num_cached) * table.is_running[slots]
        table.num_computed[slots] += progress
        is_sampled = plan.reaches_end[rows] & (progress == wanted)
        table.num_known[slots] += is_sampled

    def _pop_flight(self, step: int) -> StepInFlight:
        flight = self._flights.popleft()
        assert flight.step == step, f"step {step} is done before step {flight.step}"
        self.completed_step = step
        self._must_wait = False
        return flight

    def _find_suspects(self, flight: StepInFlight) -> list[Sequence]:
        """The sequence at fault, once `MAX_VOIDS_ALONE` steps have failed with it alone in them."""
        sequence = self.slots.sequences[int(flight.slots[0])] if len(flight.slots) == 1 else None
        if sequence is None or sequence.state is State.OVER:
            return []
        sequence.num_voids_alone += 1
        return [sequence] if sequence.num_voids_alone >= MAX_VOIDS_ALONE else []

    def check(self) -> None:
        """Raises AssertionError unless each sequence is in one place and each step accounted for."""
        self.lifecycle.check()
        assert 0 <= self.num_in_flight <= self.limits.steps_in_flight
        assert len(self._flights) == self.num_in_flight
