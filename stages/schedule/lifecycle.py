"""The life cycle of sequences: state transitions, and the updates for allocate.

Plain code behind the schedule stage. It owns the waiting queue and the slots; `planner.py` and `admitter.py` decide
which sequence runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from ..messages import Ints, PlanReport, Started, TokenRequest
from ..params import choice_seed
from .adapter_lines import AdapterLines
from .adapter_slots import AdapterSlots
from .policy import Policy
from .sequence import Sequence, State, WaitingQueue
from .service_order import ServiceOrder
from .slot_table import SlotTable


@dataclass(slots=True)
class PlanUpdates:
    """Updates for allocate, sent with the next plan; fields as in `StepPlan`."""

    started: list[Started] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)  # slots
    preempted: list[int] = field(default_factory=list)  # slots
    dropped: list[int] = field(default_factory=list)  # slots
    discarded: list[int] = field(default_factory=list)  # sequence ids
    accepted: list[tuple[int, int]] = field(default_factory=list)  # (slot, drafts)

    @property
    def can_free(self) -> bool:
        """Whether allocate could free blocks if it knew."""
        return bool(self.ended or self.preempted or self.dropped or self.discarded)

    def __bool__(self) -> bool:
        return self.can_free or bool(self.started or self.accepted)


NO_UPDATES = PlanUpdates()  # shared by all plans, which do not change it


class SequenceLifecycle:
    """Every sequence from arrival to end, in exactly one place: queue, slot or parked."""

    def __init__(self, num_slots: int, policy: Policy, short_length: int = 0, max_loras: int = 0) -> None:
        self.policy = policy
        self.short_length = short_length  # as in `StepLimits`
        self.sequences: dict[int, Sequence] = {}
        self.waiting = WaitingQueue()
        self.slots = SlotTable(num_slots)
        self.adapters = AdapterLines(AdapterSlots(max_loras)) if max_loras else None  # None: no adapters are served
        self.updates = PlanUpdates()
        self.num_returning = 0  # preempted, and not back in the queue yet
        self.num_swapped = 0  # in the queue, with blocks on the host
        self.num_parked = 0
        self.preemptions: Counter[tuple[str, str]] = Counter()  # (method: swap or recompute, cause)
        self.num_recomputed_tokens = 0  # computed again after a preemption
        self._service_order: ServiceOrder | None = None  # None: to be rebuilt, as membership changed

    @property
    def service_order(self) -> ServiceOrder:
        """The slots that are served, in order."""
        if self._service_order is None:
            self._service_order = ServiceOrder.of(self.slots)
        return self._service_order

    def take_updates(self) -> PlanUpdates:
        """Returns the updates since the last plan, and clears them."""
        if not self.updates:
            return NO_UPDATES
        updates, self.updates = self.updates, PlanUpdates()
        return updates

    # -- arrival, start, end

    def add(self, request: TokenRequest, max_model_len: int) -> None:
        """Adds the choices of a new prompt to the waiting queue.

        Adding a prompt again has no effect.
        """
        params = request.params
        num_prompt = len(request.token_ids)
        num_left = max_model_len - num_prompt
        answer = num_left if params.max_tokens is None else min(max(params.max_tokens, 1), num_left)
        if request.pooling is not None or params.max_tokens == 0:
            answer = 1  # the end of the prompt counts as a token, also in a full context
        for choice in range(params.n):
            if choice == 1 and (params.prompt_logprobs is not None or params.return_progress):
                params = replace(params, prompt_logprobs=None, return_progress=False)  # the first reports them
            sequence_id = request.first_sequence_id + choice
            if sequence_id in self.sequences:
                continue
            token_ids = request.token_ids
            if request.generated is not None:
                if choice not in request.generated:
                    continue
                token_ids = np.concatenate([token_ids, request.generated[choice]])
            sequence = Sequence(
                sequence_id,
                request.request_id,
                token_ids,
                num_prompt,
                num_prompt + answer,
                params,
                choice_seed(params.seed or 0, choice),
                request.priority,
                request.cache_salt,
                num_prompt - 1 if choice else request.num_expected_cached,  # the first choice computes it
                request.arrival_s,
                request.pooling,
                adapter="" if request.adapter is None else request.adapter.digest,
            )
            self.sequences[sequence_id] = sequence
            self.policy.on_add(sequence)
            self.waiting.push(sequence, self.policy.rank(sequence))

    def end(self, sequence_id: int) -> None:
        """Ends a sequence in any state: finished, stopped or cancelled.

        Ignores unknown ids, which have ended.
        """
        sequence = self.sequences.pop(sequence_id, None)
        if sequence is None:
            return
        before = sequence.state
        self._discard(sequence)
        sequence.move(State.OVER)
        self.num_parked -= sequence.is_parked
        if before in (State.WAITING, State.SWAPPED):
            self._leave_queue(sequence)
        elif before is State.RUNNING:
            self._leave(sequence)
            self.updates.ended.append(sequence.slot)
        elif before is State.PREEMPTED:
            self.num_returning -= 1
        self.policy.on_end(sequence)

    def start(self, sequence: Sequence) -> None:
        """Gives a slot to a sequence that was taken from the queue."""
        rank = () if self.adapters is None else self.policy.rank(sequence)
        self.num_swapped -= sequence.state is State.SWAPPED
        sequence.move(State.RUNNING)
        sequence.num_starts += 1
        sequence.is_long = self._is_long(sequence)
        is_limited = self.short_length and not sequence.is_long
        sequence.run_limit = min(sequence.limit, self.short_length + 1) if is_limited else sequence.limit
        if self.adapters is not None:
            self.adapters.join(sequence, rank)
        self.slots.enter(sequence, self.policy.weight(sequence))
        self.updates.started.append(sequence.started())
        self._service_order = None

    def _is_long(self, sequence: Sequence) -> bool:
        return 0 < self.short_length < len(sequence.token_ids)

    def _leave_queue(self, sequence: Sequence) -> None:
        if self.adapters is None or not self.adapters.remove(sequence):
            self.waiting.remove(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.adapter_slot and self.adapters is not None:
            self.adapters.slots.leave(sequence.adapter_slot, int(self.slots.last_step[sequence.slot]))
            sequence.adapter_slot = 0
        self.slots.leave(sequence.slot)
        self.updates.started = [started for started in self.updates.started if started.slot != sequence.slot]
        self.updates.accepted = [(slot, count) for slot, count in self.updates.accepted if slot != sequence.slot]
        self._service_order = None

    # -- preemption

    def take_slot(self, slot: int, cause: str) -> None:
        """Preempts the running sequence in `slot`, for a slot, for blocks, or as it outgrew its factors (`cause`)."""
        self.updates.preempted.append(slot)
        self.note_preempted(slot, cause)

    def lengthen(self) -> None:
        """Preempts the short sequences that have as many tokens as their rotary factors serve, and go on.

        Nothing is swapped. They come back as long ones, and all their tokens are computed again.
        """
        table = self.slots
        for slot in (table.is_running & (table.num_known >= table.limit)).nonzero()[0].tolist():
            sequence = table.sequences[slot]
            if sequence is not None and sequence.run_limit < sequence.limit:
                self.updates.dropped.append(slot)
                self.take_slot(slot, "rope")

    def note_preempted(self, slot: int, cause: str) -> None:
        """Records that the sequence in `slot` was preempted. A parked sequence does not count it."""
        sequence = self.slots.sequences[slot]
        if sequence is None or sequence.state is not State.RUNNING:
            return  # it ended while allocate preempted it
        sequence.num_preempted += not sequence.is_parked and cause != "rope"
        sequence.lost_for = cause
        sequence.num_lost += int(self.slots.num_computed[slot])
        self._return(sequence)

    def note_swap_outcome(self, slot: int, report: PlanReport, *, is_void: bool) -> None:
        """Records whether the preempted sequence of `slot` was swapped out.

        It was not if the step that copies its blocks was voided (`is_void`). No other sequence can have the slot
        before the next plan.
        """
        sequence = self.slots.sequences[slot]
        num_swapped = report.swapped.get(slot, 0)
        if sequence is None:
            return
        is_swapped = num_swapped > 0 and sequence.state is State.PREEMPTED and not is_void
        if is_swapped:
            sequence.num_swapped, sequence.swapped_step = num_swapped, report.step
        elif num_swapped:
            self.updates.discarded.append(sequence.sequence_id)
        if sequence.lost_for:
            self.preemptions["swap" if is_swapped else "recompute", sequence.lost_for] += 1
            sequence.lost_for = ""

    def take_back(self, slots: Iterable[int], *, reports_dropped: bool) -> None:
        """Sends running sequences back to the queue, as their blocks cannot be trusted.

        This does not count as preemption. With `reports_dropped`, the slots are reported to allocate.
        """
        for slot in slots:
            sequence = self.slots.sequences[slot]
            assert sequence is not None
            self._return(sequence)
            if reports_dropped:
                self.updates.dropped.append(slot)

    def _return(self, sequence: Sequence) -> None:
        sequence.move(State.PREEMPTED)
        sequence.num_expected_cached = 0  # its cached blocks may be gone
        self.num_returning += 1
        self._leave(sequence)

    def free_slots(self, completed_step: int, last_granted: int) -> None:
        """Frees slots that no step in flight uses; queues or parks their preempted sequences."""
        for sequence in self.slots.free_slots(completed_step, last_granted):
            self.num_returning -= 1
            if self._is_long(sequence) and not sequence.is_long:
                self._discard(sequence)  # keys with the factors of a short sequence
            if sequence.is_parked:
                sequence.move(State.PARKED)
            else:
                self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.move(State.SWAPPED if sequence.num_swapped else State.WAITING)
        self.num_swapped += sequence.state is State.SWAPPED
        self.waiting.push(sequence, self.policy.rank(sequence))

    # -- blocks on the host, and recomputed tokens

    def note_started(self, slot: int, num_cached: int) -> None:
        """Records that the first `num_cached` tokens of a starting sequence need not be computed."""
        sequence = self.slots.sequences[slot]
        if sequence is not None:
            sequence.num_swapped = 0
            sequence.num_lost -= min(num_cached, sequence.num_lost)

    def note_computed(self, slots: Iterable[int], num_tokens: Ints) -> None:
        """Counts the recomputed tokens among those granted."""
        for slot, count in zip(slots, num_tokens.tolist(), strict=True):
            sequence = self.slots.sequences[slot]
            if sequence is not None and sequence.num_lost:
                num_again = min(count, sequence.num_lost)
                sequence.num_lost -= num_again
                self.num_recomputed_tokens += num_again

    def give_up_swapped(self, void_step: int) -> None:
        """Gives up host blocks that `void_step` or a later step was to write."""
        for sequence in self.sequences.values():
            if sequence.num_swapped and sequence.swapped_step >= void_step:
                self._discard(sequence)
                if sequence.state is State.SWAPPED:
                    sequence.move(State.WAITING)

    def _discard(self, sequence: Sequence) -> None:
        """Gives up the sequence's blocks on the host."""
        if sequence.num_swapped:
            self.updates.discarded.append(sequence.sequence_id)
            sequence.num_swapped = 0
            self.num_swapped -= sequence.state is State.SWAPPED

    # -- slow readers

    def park(self, sequence_id: int) -> None:
        """Parks a sequence whose client does not read: not served, and preempted first.

        Ignores unknown ids.
        """
        sequence = self.sequences.get(sequence_id)
        if sequence is None or sequence.is_parked:
            return
        sequence.is_parked = True
        self.num_parked += 1
        if sequence.state is State.RUNNING:
            self.slots.is_parked[sequence.slot] = True
            self._service_order = None
        elif sequence.state in (State.WAITING, State.SWAPPED):
            self._leave_queue(sequence)
            self.num_swapped -= sequence.state is State.SWAPPED
            sequence.move(State.PARKED)

    def unpark(self, sequence_id: int) -> None:
        """Unparks a sequence: its client reads again. Ignores unknown ids."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None or not sequence.is_parked:
            return
        sequence.is_parked = False
        self.num_parked -= 1
        if sequence.state is State.RUNNING:
            self.slots.is_parked[sequence.slot] = False
            self._service_order = None
        elif sequence.state is State.PARKED:
            self._enqueue(sequence)

    def check(self) -> None:
        """Raises AssertionError unless each sequence is in exactly one place (I10)."""
        in_slots = [s for s in self.slots.sequences if s is not None and s.state is not State.OVER]
        running = [s for s in in_slots if s.state is State.RUNNING]
        waiting = [*self.waiting, *(() if self.adapters is None else self.adapters)]
        num_aside = 0 if self.adapters is None else len(self.adapters)
        aside = [s for s in self.sequences.values() if s.state is State.PARKED]
        assert len(running) == self.slots.num_running, f"{len(running)} run, the table has {self.slots.num_running}"
        assert len(in_slots) - len(running) == self.num_returning, "the count of returning sequences is wrong"
        assert len(waiting) == len(self.waiting) + num_aside, "the length of the queue is wrong"
        if self.adapters is not None:
            self.adapters.check(running)
        num_swapped = sum(s.state is State.SWAPPED for s in waiting)
        assert num_swapped == self.num_swapped, f"{num_swapped} sequences are swapped, the counter says otherwise"
        assert all(s.num_swapped > 0 for s in waiting if s.state is State.SWAPPED), "swapped, with nothing on the host"
        num_parked = sum(s.is_parked for s in self.sequences.values())
        assert num_parked == self.num_parked, f"{num_parked} sequences are parked, the counter says otherwise"
        assert {s.sequence_id for s in in_slots}.isdisjoint(s.sequence_id for s in waiting)
        assert len(in_slots) + len(waiting) + len(aside) == len(self.sequences), "a sequence is in no place, or in two"
