"""One engine in virtual time: the real intake, schedule and allocate around a device of a cost model.

Stages are called one after another, as an engine's loop would call them. Time moves from event to event: an arrival, a
client that leaves, a step that is done, a plan that is due. Clients read at once, and nothing fails.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.simulation.manual_env import run_at_once
from ..allocate.key_changes import KeyChanges, KeyDelta
from ..array_checks import num_true
from ..errors import Overloaded
from ..intake.stage import Intake
from ..messages import AdapterRef, Indices, Prompt, Request, StepDone, StepPlan, TokenRequest
from ..params import SamplingParams
from ..request_limits import RequestLimits
from ..routing.engine_load import EngineLoad
from ..routing.reported_load import load_of
from ..schedule.policy import Policy
from ..schedule.step_timing.step_time_model import StepTimeCosts
from .cost_model import CostModel
from .recorded_engine import RecordedEngine
from .repetition import Repetition
from .replay import ReplayedCore
from .simulated_device import SimulatedDevice, SimulatedDrafter, SimulatedStep
from .simulation_result import RequestOutcome, SimulationResult
from .workloads import WorkloadRequest

VOCAB_SIZE = 2**31 - 1  # token ids of traces have no meaning


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Admission limits, as in `EngineConfig`."""

    max_admitted_requests: int = 1024
    max_waiting_requests: int = 512


@dataclass(slots=True, eq=False)
class _Refusals:
    """The outlet of intake: collects passed and refused requests."""

    passed: list[Request] = field(default_factory=list)
    refused: list[tuple[Request, BaseException]] = field(default_factory=list)

    def send(self, item: Any, port: str = "out") -> None:
        self.passed.append(item)

    async def flush(self) -> None:
        pass

    def fail(self, item: Any, error: BaseException) -> None:
        self.refused.append((item, error))

    def reply(self, item: Any) -> None:
        raise AssertionError("intake does not reply")


class SimulatedEngine:
    """An engine that serves the requests it is told to expect, as far as `advance` lets its time go."""

    def __init__(
        self,
        engine: RecordedEngine,
        model: CostModel,
        admission: AdmissionLimits | None = None,
        policy: Policy | None = None,
    ) -> None:
        admission = admission or AdmissionLimits()
        self._repeats: dict[int, Repetition] = {}  # of the answers to requests so far, by sequence
        drafter = SimulatedDrafter(self._repeats, engine.most_drafts) if engine.most_drafts else None
        self.core = ReplayedCore(engine, policy, drafter=drafter)
        self.outcomes: dict[int, RequestOutcome] = {}  # by the request's number, in order of arrival
        self.num_expected = 0  # requests so far
        self._model = model
        self._costs = StepTimeCosts(
            model.step_s, model.prefill_token_s, model.prefill_pair_s, model.decode_row_s, model.decode_context_s
        )
        self._key_changes: KeyChanges | None = None
        self._ended: list[int] = []
        self._intake = Intake(
            RequestLimits(VOCAB_SIZE, engine.max_model_len),
            admission.max_admitted_requests,
            admission.max_waiting_requests,
        )
        run_at_once(self._intake.setup(self.core.context("intake")))
        self.device = SimulatedDevice(model, engine.max_num_seqs, self._repeats)
        self._upcoming: deque[tuple[float, int, WorkloadRequest]] = deque()  # (when it arrives at schedule, number, _)
        self._tokenized: deque[TokenRequest] = deque()  # that schedule does not want yet
        self._reports: list[Any] = []  # that did not wake schedule
        self._leaving: list[tuple[float, int]] = []  # a heap of (when, sequence)
        self._gaps: list[NDArray[np.float64]] = []  # between tokens of a row
        self._even_gaps: list[tuple[float, int]] = []  # the same for steady steps: (gap, rows)
        self._even_slots: Indices | None = None  # rows of the last step, if it was steady
        self._last_s = 0.0  # when the last step was done
        self._last_token_s = np.zeros(engine.max_num_seqs)  # [S], except for rows in `_even_slots`
        self._most_rows = 0

    def expect(self, number: int, request: WorkloadRequest) -> None:
        """The request will arrive: not before those expected earlier, nor before the time reached."""
        self.num_expected += 1
        sent_s = request.arrival_s if request.sent_s is None else request.sent_s
        self._upcoming.append((sent_s + self._model.front_s, number, request))

    @property
    def next_event_s(self) -> float:
        """When something happens next; infinity if nothing does."""
        arrives_s = self._upcoming[0][0] if self._upcoming else math.inf
        done_s = self.device.flights[0].end_s if self.device.flights else math.inf
        leaves_s = self._leaving[0][0] if self._leaving else math.inf
        return min(arrives_s, done_s, leaves_s, self.core.env.next_alarm_s)

    def advance(self, until_s: float = np.inf) -> None:
        """Lets all happen that happens before `until_s`."""
        flights, upcoming = self.device.flights, self._upcoming
        while (now_s := self.next_event_s) < until_s:
            self.core.env.time_s = now_s
            self.core.env.ring()
            batch: list[Any] = []
            if flights and flights[0].end_s == now_s:
                batch.append(self._finish(flights.popleft()))
            while self._leaving and self._leaving[0][0] <= now_s:
                self._leave(heapq.heappop(self._leaving)[1], now_s)
            while upcoming and upcoming[0][0] <= now_s:
                self._arrive(*upcoming.popleft()[1:])
            self._turn(batch)

    # -- for a router

    def watch_keys(self) -> None:
        """Collects the keys of cached blocks for `take_keys`. Call it before anything is expected."""
        if self.core.allocate.allocator.cache is not None:
            self._key_changes = self.core.allocate.allocator.cache.watch_keys()

    def take_keys(self) -> KeyDelta:
        """The keys of cached blocks that came and went since the last call."""
        return KeyDelta([], []) if self._key_changes is None else self._key_changes.take()

    def load(self) -> EngineLoad:
        """The report of an engine, with the costs of its model and all that it was told to expect."""
        return load_of(self.core.schedule.scheduler, self.core.allocate.allocator, self._costs, self.num_expected)

    def take_ended(self) -> list[int]:
        """The requests that have ended since the last call, by number."""
        ended, self._ended = self._ended, []
        return ended

    def unfinished(self) -> list[tuple[int, int]]:
        """(number, tokens of its answer so far) of each request that it has not ended, in order of arrival."""
        table = self.core.schedule.scheduler.slots
        done = {
            sequence.sequence_id: len(table.known_tokens(sequence) if sequence.slot >= 0 else sequence.token_ids)
            - sequence.num_prompt
            for sequence in self.core.schedule.scheduler.sequences.values()
        }
        done = {request.first_sequence_id: _num_done(request) for request in self._tokenized} | done
        here = [number for number, outcome in self.outcomes.items() if outcome.how == "unfinished"]
        return [(number, done[number]) for number in here] + [(one[1], one[2].num_done) for one in self._upcoming]

    # -- the loop of the stages

    def _turn(self, batch: list[Any]) -> None:
        """Runs schedule and allocate in turns until neither has work."""
        core = self.core
        reports, self._reports = self._reports, []
        batch = [*reports, *batch]
        if self._tokenized and core.schedule.wants("in"):
            batch += self._tokenized
            self._tokenized.clear()
        plans: Sequence[StepPlan]
        plans, _ = core.run_schedule(batch)
        while plans:
            answers = core.run_allocate(plans)
            for grant, _ in answers:
                if grant is not None:
                    self.device.launch(grant, core.env.time_s)
                    self._most_rows = max(self._most_rows, len(grant.slots))
            self._reports = [report for _, report in answers]
            if not core.schedule.wakes("report"):
                return
            reports, self._reports = self._reports, []
            plans, _ = core.run_schedule(reports)

    def _arrive(self, number: int, workload_request: WorkloadRequest) -> None:
        outcome = RequestOutcome(workload_request.arrival_s, workload_request.num_prompt)
        self.outcomes[number] = outcome
        params = _params(workload_request.num_answer)
        tokens = workload_request.tokens(number)
        if workload_request.repeats is not None:
            self._repeats[number] = workload_request.repeats
        request = Request(
            str(number),
            (Prompt(token_ids=tokens),),
            params,
            first_sequence_id=number,
            priority=workload_request.priority,
            arrival_s=workload_request.arrival_s,
            cache_salt=workload_request.cache_salt,
            adapter=AdapterRef("", workload_request.adapter) if workload_request.adapter else None,
        )
        out = _Refusals()
        run_at_once(self._intake.handle((request,), out))
        for _, error in out.refused:
            outcome.how = "turned away" if isinstance(error, Overloaded) else "too long"
            self._ended.append(number)
        for request in out.passed:
            args = (request.request_id, 0, tokens, params, number, request.priority, request.arrival_s)
            done = workload_request.num_done
            generated = {0: np.zeros(done, np.int32)} if done else None
            more = TokenRequest(*args, request.cache_salt, adapter=request.adapter, generated=generated)
            self._tokenized.append(more)
            if workload_request.leaves_s is not None:
                heapq.heappush(self._leaving, (workload_request.arrival_s + workload_request.leaves_s, number))

    def _leave(self, number: int, now_s: float) -> None:
        outcome = self.outcomes[number]
        if outcome.how == "unfinished":
            outcome.how, outcome.end_s = "left", now_s
            self._ended.append(number)
            self.core.lane.post(number, "cancel")
            self._tokenized = deque(each for each in self._tokenized if each.first_sequence_id != number)
            self._intake.admission.release(str(number), now_s, is_served=False)

    # -- the outcome of a step

    def _finish(self, flight: SimulatedStep) -> StepDone:
        """Processes a step that is done: records the times of its tokens."""
        done, now_s = flight.done, flight.end_s
        if flight.is_steady:
            self._even_gaps.append((now_s - self._last_s, len(done.slots)))
            self._last_s, self._even_slots = now_s, done.slots
            return done
        if self._even_slots is not None:
            self._last_token_s[self._even_slots], self._even_slots = self._last_s, None
        self._last_s = now_s
        gaps_s = now_s - self._last_token_s[done.slots]
        if done.most_tokens > 1:
            gaps_s[1:][done.slots[1:] == done.slots[:-1]] = 0.0  # several tokens of a sequence in one step
        is_first = done.places == 0
        if num_true(is_first):
            for number in done.sequence_ids[is_first].tolist():
                self._begin(number, now_s)
            gaps_s = gaps_s[~is_first]
        self._gaps.append(gaps_s)
        self._last_token_s[done.slots] = now_s
        for row in done.is_finished.nonzero()[0].tolist():
            self._end(int(done.sequence_ids[row]), int(done.places[row]) + 1, now_s)
        return done

    def _begin(self, number: int, now_s: float) -> None:
        outcome = self.outcomes[number]
        if outcome.how == "unfinished":
            outcome.first_token_s = now_s
            self._intake.request_started(str(number))

    def _end(self, number: int, num_tokens: int, now_s: float) -> None:
        outcome = self.outcomes[number]
        if outcome.how == "unfinished":
            outcome.how, outcome.end_s, outcome.num_tokens = "finished", now_s, num_tokens
            self._ended.append(number)
            self._intake.admission.release(str(number), now_s, is_served=True)

    # -- results

    def result(self) -> SimulationResult:
        """What it has served so far. `duration_s` is from the first arrival to the last end."""
        scheduler, cache = self.core.schedule.scheduler, self.core.allocate.allocator.cache
        outcomes = list(self.outcomes.values())
        ends_s = [outcome.end_s for outcome in outcomes if outcome.end_s is not None]
        began_s = min((outcome.arrival_s for outcome in outcomes), default=0.0)
        even = np.array(self._even_gaps).reshape(-1, 2)
        gaps_s = [*self._gaps, np.repeat(even[:, 0], even[:, 1].astype(np.intp))]
        result = SimulationResult(outcomes, np.concatenate(gaps_s), most_rows=self._most_rows)
        result.duration_s = max(ends_s, default=began_s) - began_s
        result.num_steps, result.busy_s = self.device.num_steps, self.device.busy_s
        result.num_preemptions = scheduler.num_preemptions
        result.num_recomputed_tokens = scheduler.num_recomputed_tokens
        result.num_draft_tokens = scheduler.speculation.num_draft_tokens
        result.num_accepted_tokens = scheduler.speculation.num_accepted_tokens
        if cache is not None:
            result.num_queries, result.num_hits = cache.num_queries, cache.num_hits
        return result


@cache
def _params(num_answer: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_answer, ignore_eos=True)


def _num_done(request: TokenRequest) -> int:
    """Tokens of the answer with which a request comes."""
    return 0 if request.generated is None else len(request.generated[0])
