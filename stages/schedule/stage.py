"""The schedule stage: takes requests and feedback, and plans steps.

It plans when a credit is free and it is time. The decisions are in `scheduler.py`, the timing in `plan_timing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...runtime.env.env import Alarm
from ...runtime.stage import Context, Crash, Outlet, Stage
from ...runtime.trace.tracer import EventKind
from ..array_checks import num_true
from ..errors import RequestError
from ..messages import Guess, PlanReport, Started, StepDone, StepPlan, StepVoid, TokenRequest
from .ngram_drafter import GuessesTokens
from .policy import Policy
from .queue_trace import QueueTrace
from .scheduler import Scheduler, StepLimits
from .sequence import Sequence as ScheduledSequence
from .step_timing.plan_timing import PlanTimer

if TYPE_CHECKING:
    from ..call_log import CallLog


NO_CAUSES: Mapping[int, str] = {}


class Schedule(Stage[TokenRequest, StepPlan]):
    """Plans steps.

    It takes reports before feedback, since a step is granted before it is done, and both before new requests, so that
    the loop never waits for itself.

    The control lane names sequences that have ended (cancelled, past their deadline, stopped by a stop string). Such a
    sequence runs for at most K + 1 more steps, and their tokens are dropped. The lane also names sequences to park or
    unpark, as their clients stop or resume reading.

    While a step runs, `plan_timer` decides when to plan the next one. An alarm wakes the stage at that time.

    `call_log` records each call and its results. The guesses of the `drafter` are recorded as inputs, so that a replay
    needs no token texts.
    """

    inputs: ClassVar = {"report": PlanReport, "feedback": StepDone | StepVoid, "in": TokenRequest}
    outputs: ClassVar = {"out": StepPlan}
    on_crash: ClassVar = Crash.RECOVER
    reads_lane: ClassVar = True

    def __init__(
        self,
        limits: StepLimits,
        max_waiting: int = 512,
        policy: Policy | None = None,
        drafter: GuessesTokens | None = None,
        first_step: int = 0,
    ) -> None:
        self.scheduler = Scheduler(limits, policy, first_step)
        self.drafter = drafter
        self.plan_timer = PlanTimer()
        self.early_override: bool | None = (
            None  # set by a replay: whether it is too early to plan; None: `plan_timer` decides
        )
        # Prompts; more stay in the channel, which holds back its senders. Those set aside for an adapter do not count:
        # they must not hold back others, and intake bounds them.
        self.max_waiting = max_waiting
        self.last_step_s = 0.0  # when a step was last planned or done
        self.call_log: CallLog | None = None
        self.on_start: list[Callable[[Sequence[Started]], object]] = []  # called with the sequences that got slots
        self._batch: Sequence[Any] = ()
        self._taken = 0  # messages of the batch already taken
        self._context: Context | None = None
        self._alarm: Alarm | None = None
        self._has_waited = False  # whether a plan was delayed while the current step runs
        self._trace: QueueTrace | None = None

    async def setup(self, context: Context) -> None:
        self._context = context
        self._trace = self._trace or QueueTrace(context, self.scheduler)
        self.last_step_s = context.env.now()

    def wants(self, port: str) -> bool:
        return port != "in" or self.scheduler.num_queued < self.max_waiting

    def wakes(self, port: str) -> bool:
        """Whether a message on `port` wakes the stage.

        Not for a report after which no step can be planned: it is taken together with the next feedback.
        """
        return port != "report" or self.scheduler.may_plan_after_report

    async def handle(self, batch: Sequence[Any], out: Outlet[StepPlan]) -> None:
        self._batch, self._taken = batch, 0
        last_done = self.scheduler.completed_step
        failed = self._take(batch, out)
        is_early = self._is_early()
        guesses = () if self.drafter is None or is_early else self._guess(self.drafter)
        causes = self._take_lane()
        plans = []
        while not is_early and (plan := self.scheduler.plan()) is not None:
            self._send(plan, out)
            plans.append(plan)
        if self.scheduler.completed_step != last_done:
            self._judge_wait()
        self._has_waited |= is_early
        if self.call_log is not None:
            self.call_log.schedule([*batch, *guesses], causes, plans, failed, is_early)
        assert self._trace is not None
        self._trace.line()

    async def teardown(self) -> None:
        self._set_alarm(None)

    async def recover(self, batch: Sequence[Any], error: BaseException, out: Outlet[StepPlan]) -> None:
        """Resumes with the messages not yet taken, and recomputes everything that runs."""
        rest = batch[self._taken :] if self._batch is batch else batch
        if self.call_log is not None:
            self.call_log.crash("schedule")
        self.scheduler.rebuild()
        await self.handle(rest, out)

    def _is_early(self) -> bool:
        """Whether it is too early to plan. If so, the alarm is set."""
        if self.early_override is not None:
            return self.early_override
        assert self._context is not None
        scheduler, plan_timer = self.scheduler, self.plan_timer
        is_early = scheduler.has_last_credit and plan_timer.is_early(scheduler.expected_s, self._context.env.now())
        self._set_alarm(plan_timer.due_s if is_early else None)
        return is_early

    def _judge_wait(self) -> None:
        """Reports to `plan_timer`, after a step with a delayed plan, whether the plan was in time."""
        has_waited, self._has_waited = self._has_waited, False
        if not has_waited:
            return
        if self.scheduler.num_in_flight:
            self.plan_timer.note_waited(is_late=False)
        elif self.scheduler.is_asking:  # else there was nothing to run
            self.plan_timer.note_waited(is_late=True)

    def _set_alarm(self, when_s: float | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if when_s is not None:
            assert self._context is not None
            self._alarm = self._context.env.call_at(when_s, self._context.lane.set)

    def _guess(self, drafter: GuessesTokens) -> Sequence[Guess]:
        """Drafts for the sequences that draft or may begin to."""
        scheduler = self.scheduler
        guesses = [drafter.guess(scheduler.slots, slot) for slot in scheduler.slots_to_guess()]
        for guess in guesses:
            scheduler.take_guess(guess)
        return guesses

    def _take_lane(self) -> Mapping[int, str]:
        assert self._context is not None and self._trace is not None
        if not self._context.lane.is_set:
            return NO_CAUSES
        causes = self._context.lane.take()
        for sequence_id, cause in causes.items():
            match cause:
                case "park":
                    self._trace.parked(sequence_id, EventKind.PARKED)
                    self.scheduler.park(sequence_id)
                case "unpark":
                    self._trace.parked(sequence_id, EventKind.UNPARKED)
                    self.scheduler.unpark(sequence_id)
                case _:
                    self.scheduler.end(sequence_id)
        return causes

    def _take(self, batch: Sequence[Any], out: Outlet[StepPlan]) -> list[int]:
        """Takes the messages of the batch. Returns the ids of sequences that have failed."""
        scheduler, trace, context = self.scheduler, self._trace, self._context
        assert trace is not None and context is not None
        failed: list[int] = []
        for message in batch:
            self._taken += 1
            match message:
                case StepDone():
                    self.plan_timer.note_started(now_s := context.env.now())
                    if num_true(message.is_finished):
                        self.plan_timer.note_end(now_s)
                    failed += self._fail(scheduler.on_done(message), out)
                    trace.done(message)
                case PlanReport():
                    scheduler.on_report(message)
                    trace.reported(message)
                case TokenRequest():
                    scheduler.add(message)
                case Guess():  # only in a replay
                    scheduler.take_guess(message)
                case StepVoid():
                    self.plan_timer.note_started(context.env.now())
                    self._has_waited = False  # a voided step says nothing about the timing
                    failed += self._fail(scheduler.on_void(message), out)
        return failed

    def _fail(self, ended: Sequence[tuple[ScheduledSequence, RequestError]], out: Outlet[StepPlan]) -> list[int]:
        """Tells the clients of sequences that have failed. Returns the ids."""
        for sequence, error in ended:
            out.fail(sequence.request_id, error)
        return [sequence.sequence_id for sequence, _ in ended]

    def _send(self, plan: StepPlan, out: Outlet[StepPlan]) -> None:
        assert self._context is not None and self._trace is not None
        out.send(plan)
        if plan.started:
            for callback in self.on_start:
                callback(plan.started)
        self.last_step_s = self._context.env.now()
        if not self.scheduler.num_in_flight:
            self.plan_timer.note_started(self.last_step_s)
        self._trace.planned(plan)

    @property
    def has_work(self) -> bool:
        return not self.scheduler.is_idle
