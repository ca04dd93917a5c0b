"""The schedule stage: takes new work and feedback, and starts a step when it has a credit and it is time.

The thinking is in `scheduler.py`; when it is time, in `plan_timing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...runtime.env.env import Alarm
from ...runtime.stage import Context, Crash, Outlet, Stage
from ...runtime.trace.tracer import EventKind
from ..array_checks import num_true
from ..messages import Guess, PlanReport, Started, StepDone, StepPlan, StepVoid, TokenRequest
from .ngram_drafter import Drafter
from .plan_timing import Lead
from .policy import Policy
from .queue_trace import LineTrace
from .scheduler import Limits, Scheduler

if TYPE_CHECKING:
    from ..messages import CallLog


NO_CAUSES: Mapping[int, str] = {}


class Schedule(Stage[TokenRequest, StepPlan]):
    """Plans steps from what it is told. Reports are taken before feedback, as a step is granted before it is done, and
    both before new work, so the loop never waits for itself.

    The control lane names sequences that are over (cancelled, past their deadline, stopped by a stop string); they run
    on for at most K + 1 steps, and nobody sees what they make. And those whose clients stall, or read again.

    A plan that can wait while a step runs is made when the `lead` says so; an alarm then rings, if nothing else has
    come before it.

    A `call_log` is told of each call, and what came of it. The `drafter` guesses how answers go on; what it says is
    told to the log with what was taken, so that who replays it needs no texts.
    """

    inputs: ClassVar = {"report": PlanReport, "feedback": StepDone | StepVoid, "in": TokenRequest}
    outputs: ClassVar = {"out": StepPlan}
    on_crash: ClassVar = Crash.RECOVER
    reads_lane: ClassVar = True

    def __init__(
        self,
        limits: Limits,
        max_waiting: int = 512,
        policy: Policy | None = None,
        drafter: Drafter | None = None,
        first_step: int = 0,
    ) -> None:
        self.scheduler = Scheduler(limits, policy, first_step)
        self.drafter = drafter
        self.lead = Lead()
        self.told_early: bool | None = None  # whether it is too early to plan, by who knows; None: nobody does
        self.max_waiting = max_waiting  # prompts; more stay in the channel, and hold their senders back
        self.last_step_s = 0.0  # when a step was last planned or done
        self.call_log: CallLog | None = None
        self.on_start: list[Callable[[Sequence[Started]], object]] = []  # told of those that get slots
        self._batch: Sequence[Any] = ()
        self._taken = 0  # messages of it
        self._context: Context | None = None
        self._alarm: Alarm | None = None
        self._has_waited = False  # a plan, beside the step that runs
        self._trace: LineTrace | None = None

    async def setup(self, context: Context) -> None:
        self._context = context
        self._trace = self._trace or LineTrace(context, self.scheduler)
        self.last_step_s = context.env.now()

    def wants(self, port: str) -> bool:
        return port != "in" or self.scheduler.num_waiting < self.max_waiting

    def wakes(self, port: str) -> bool:
        """A report after which no step could begin comes with the feedback that lets the next one begin."""
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
        """Goes on with the messages it had not taken, and computes anew all that runs."""
        rest = batch[self._taken :] if self._batch is batch else batch
        if self.call_log is not None:
            self.call_log.crash("schedule")
        self.scheduler.rebuild()
        await self.handle(rest, out)

    def _is_early(self) -> bool:
        """Whether nothing is to be planned yet. If so, the alarm is set."""
        if self.told_early is not None:
            return self.told_early
        assert self._context is not None
        scheduler, lead = self.scheduler, self.lead
        is_early = scheduler.has_last_credit and lead.is_early(scheduler.expected_s, self._context.env.now())
        self._set_alarm(lead.due_s if is_early else None)
        return is_early

    def _judge_wait(self) -> None:
        """A step is done. If a plan waited beside it: whether there was one when the device wanted it."""
        has_waited, self._has_waited = self._has_waited, False
        if not has_waited:
            return
        if self.scheduler.num_in_flight:
            self.lead.note_waited(is_late=False)
        elif self.scheduler.is_asking:  # since just now, perhaps; else there was nothing to run
            self.lead.note_waited(is_late=True)

    def _set_alarm(self, when_s: float | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if when_s is not None:
            assert self._context is not None
            self._alarm = self._context.env.call_at(when_s, self._context.lane.ring)

    def _guess(self, drafter: Drafter) -> Sequence[Guess]:
        """Of sequences that draft, or may begin to, how they may go on."""
        scheduler = self.scheduler
        guesses = [drafter.guess(scheduler.slots, slot) for slot in scheduler.slots_to_guess()]
        for guess in guesses:
            scheduler.take_guess(guess)
        return guesses

    def _take_lane(self) -> Mapping[int, str]:
        assert self._context is not None and self._trace is not None
        if not self._context.lane.is_rung:
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
        """Returns the sequences that are given up."""
        scheduler, trace, context = self.scheduler, self._trace, self._context
        assert trace is not None and context is not None
        failed: list[int] = []
        for message in batch:
            self._taken += 1
            match message:
                case StepDone():
                    self.lead.note_begun(now_s := context.env.now())
                    if num_true(message.is_finished):
                        self.lead.note_end(now_s)
                    scheduler.on_done(message)
                    trace.done(message)
                case PlanReport():
                    scheduler.on_report(message)
                    trace.reported(message)
                case TokenRequest():
                    scheduler.add(message)
                case Guess():  # in a recording that is run again
                    scheduler.take_guess(message)
                case StepVoid():
                    self.lead.note_begun(context.env.now())
                    self._has_waited = False  # no plan was wanted then
                    for sequence, error in scheduler.on_void(message):
                        out.fail(sequence.request_id, error)
                        failed.append(sequence.sequence_id)
        return failed

    def _send(self, plan: StepPlan, out: Outlet[StepPlan]) -> None:
        assert self._context is not None and self._trace is not None
        out.send(plan)
        if plan.started:
            for tell in self.on_start:
                tell(plan.started)
        self.last_step_s = self._context.env.now()
        if not self.scheduler.num_in_flight:
            self.lead.note_begun(self.last_step_s)
        self._trace.planned(plan)

    @property
    def has_work(self) -> bool:
        return not self.scheduler.is_idle
