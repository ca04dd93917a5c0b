"""The device thread: runs each step's forward pass and then its sampling, in order.

`Device` is called on the event loop, by the stages. The functions it submits run on the device thread. Does not
depend on torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from ...runtime.env.env import Env
from ...runtime.histogram import STAGE_BOUNDS_US, Histogram
from ...runtime.stage import Context
from ...runtime.trace.tracer import EventKind, Tracer
from ...runtime.workers.step_queue import StepQueue, ignore_error
from ...runtime.workers.worker import BEFORE_BLOCKING, IMMEDIATELY, ON_REQUEST, WhenDone, Worker
from ..messages import Started, StepGrant, StepTokens
from .device_guard import PROBE_S, DeviceGuard, DeviceLost
from .step_result import StepResult
from .step_watch import StepWatch, work_of

R = TypeVar("R")
CallBefore = Callable[[Callable[[], object]], object]

FORWARD, SAMPLE = 0, 1  # the phases of a step
MOST_IN_FLIGHT = 64  # steps; engines have at most a few
STEP_EXECUTED, STEP_SAMPLED = int(EventKind.STEP_EXECUTED), int(EventKind.STEP_SAMPLED)


class RunsForward(Protocol):
    """A model, as the execute stage uses it."""

    def forward(self, grant: StepGrant) -> StepResult:
        """Runs one step and returns its logits, or what `StepResult` says, for `ChoosesTokens.sample` to read.

        Called on the device thread, in the order of grants. Grants that are void with an earlier one are skipped.
        """


@runtime_checkable
class RunsAhead(Protocol):
    """A model that may start a step when the previous one ends, and choose its tokens with it."""

    def offer(self, grant: StepGrant) -> None:
        """Receives a step that will be sampled, before its `forward` is submitted.

        Called on the event loop. `forward` may then return a `TokenChoice`. A step that becomes void with an earlier
        one may still run: the model must keep it from affecting later steps.
        """


class ChoosesTokens(Protocol):
    """A sampler, as the sample stage uses it."""

    def prepare(self, started: Sequence[Started]) -> None:
        """Receives the sequences that start with a submitted step, before it is sampled.

        Called on the event loop.
        """

    def sample(self, grant: StepGrant, logits: Any) -> StepTokens:
        """Chooses one token for each sampled row of the grant. Called on the device thread.

        `logits`: the `StepResult` of the same backend's `forward`, which is of the kind that this sampler reads.

        Runs after the step's forward pass and before the next one, unless the model has chosen the tokens. It is also
        called when no row is sampled, because the grant carries state that the sampler needs.
        """


class StepSkipped(Exception):
    """The step was not run: an earlier step of its generation, or of a later one, failed."""


class DeviceFault(Exception):
    """An injected fault: the device fails as a kernel would."""


class DeviceTimes:
    """The device's time in forward passes, and the ends of phases. Its threads write, the loop reads.

    Each step calls these methods: whole nanoseconds in dictionaries cost less than an object for each step.
    """

    def __init__(self) -> None:
        self.forward_us = Histogram(STAGE_BOUNDS_US)  # of each pass
        self._running: dict[int, int] = {}  # by step: when the device could begin with it, ns
        self._ended = (0, 0)  # ns: sum of all passes, and when the last one ended; replaced at once
        self._forward_ends: dict[int, int] = {}  # by step, ns, until `forget`
        self._sample_ends: dict[int, int] = {}  # the same; none of an asynchronous device
        self._long_ns = 0  # the longest pass, of the last ones

    def begin(self, step: int, now_ns: int) -> None:
        """A pass begins, or waits for the one before."""
        self._running[step] = now_ns

    def end(self, step: int, now_ns: int, *, is_kept: bool) -> int:
        """A pass has ended; returns its microseconds. `is_kept`: `forget` will be called."""
        total_ns, last_ns = self._ended
        began_ns = self._running.get(step, now_ns)
        if began_ns < last_ns:
            began_ns = last_ns
        took_ns = now_ns - began_ns if now_ns > began_ns else 0
        if is_kept:
            self._forward_ends[step] = now_ns
        self._ended = (total_ns + took_ns, now_ns)  # before it stops to run: the sum never decreases
        self._running.pop(step, None)
        self._long_ns = took_ns if took_ns > self._long_ns else self._long_ns - (self._long_ns >> 6)
        took_us = took_ns // 1000
        self.forward_us.observe(took_us)
        return took_us

    @property
    def backlog_s(self) -> float:
        """Seconds that the passes in flight may take at most, by the longest of the last ones."""
        return len(self._running) * self._long_ns / 1e9

    def end_sampling(self, step: int, now_ns: int) -> None:
        """The sampling of a step has ended, before its result is delivered."""
        self._sample_ends[step] = now_ns

    def sampled_s(self, step: int, since_s: float, now_s: float) -> float:
        """Seconds between the two times in which the device's thread sampled a step."""
        forward_ns = self._forward_ends.get(step)
        if forward_ns is None:
            return 0.0
        end_ns = self._sample_ends.get(step)
        end_s, begin_s = now_s if end_ns is None else end_ns / 1e9, forward_ns / 1e9
        return max(0.0, end_s - (begin_s if begin_s > since_s else since_s))

    def forget(self, step: int) -> None:
        """Drops the ends of a step's phases: it is reported."""
        self._forward_ends.pop(step, None)
        self._sample_ends.pop(step, None)

    def forward_s(self, now_s: float) -> float:
        """Seconds in passes up to now, with the one that runs."""
        running = list(self._running.values())  # before the sum: see `end`
        total_ns, last_ns = self._ended
        since_ns = max(min(running, default=0), last_ns)
        running_s = max(0.0, now_s - since_ns / 1e9) if running else 0.0
        return total_ns / 1e9 + running_s


class Device:
    """Runs the phases of all steps in order on one thread, whatever order they are submitted in.

    When a phase raises, its step is void. Later steps of the same or an older generation are void too: they raise
    `StepSkipped` instead of running. A grant of a higher generation runs again.
    NOTE: a step submitted to one phase must be submitted to all phases: the thread waits for it (see `StepQueue`).
    """

    is_async: ClassVar[bool] = False  # whether it is asynchronous: it finishes a step later than its thread does

    def __init__(
        self,
        enter: Callable[[], object] | None = None,
        call_before_computing: CallBefore | None = None,
        probe: Callable[[], object] | None = None,
        watch: CallBefore | None = None,
    ) -> None:
        """`enter` is the first call on the device thread.

        `call_before_computing` registers a callback with the model. `forward` calls the callback when its inputs are
        ready and it is about to release the interpreter lock. The result of the previous step is delivered then:
        delivered earlier, the loop would delay the thread's preparation.

        `probe` finds out after a failed step whether the device is lost, see `DeviceGuard`; None: it cannot be.
        `watch` registers a callback that is called, on any thread, when it may be lost without a step that fails.
        """
        self.on_gone: list[Callable[[DeviceLost], object]] = []  # called once, on the loop, if `watch` says so
        self.on_lost: list[Callable[[DeviceLost], object]] = []  # called once, on the loop: results may never come
        self.guard = None if probe is None else DeviceGuard(probe, self._probe_limit_s, self._note_lost)
        self.watch: StepWatch | None = None  # with a guard: finds a step that never ends
        self._enter, self._watch = enter, watch
        self._call_before_computing = call_before_computing
        self._worker: Worker | None = None
        self._env: Env | None = None
        self._queue: StepQueue | None = None
        self._num_phases = 0
        self._now_ns: Callable[[], int] = _never
        self._tracer: Tracer | None = None
        self._sources = [0, 0]  # of the stages, by phase, in the trace
        self.times = DeviceTimes()
        self._void_at_completion = -1  # generation; written by the completion thread of an asynchronous device alone
        # Written by the device thread alone.
        self._void_generation = -1
        self._enter_error: BaseException | None = None
        self._last_end_ns = 0  # of a phase
        self._last_forwarded = -1  # step
        self._logits: StepResult = None  # of the step that is between its phases
        self._error: BaseException | None = None

    @property
    def first_step(self) -> int:
        """The first step that was submitted. Requires that one was."""
        assert self._queue is not None, "no step was submitted yet"
        return self._queue.first_step

    @property
    def idle_gaps_us(self) -> Histogram | None:
        """Idle time between two steps while work was queued; None if the device is not asynchronous."""
        return None

    def join(self, context: Context, phase: int) -> None:
        """Declares that a stage will submit each step to `phase`.

        Called in the stage's set-up; idempotent. A pipeline that ends at the logits has no second phase, and the thread
        does not wait for one. Raises `ThreadNotStarted` while the system allows no thread.
        """
        if self._worker is None:
            worker = context.env.worker("device")
            worker.start()  # now, so that no step can fail for lack of a thread
            self._env, self._worker = context.env, worker
            self._now_ns, self._tracer = context.env.now_ns, context.tracer
            if self._call_before_computing is not None:
                self._call_before_computing(self._worker.deliver)
            if self.guard is not None:
                self.guard.join(context.env)
                self.watch = StepWatch(self.guard, context.env)
                if self._watch is not None:
                    self._watch(partial(_call_on, asyncio.get_running_loop(), self._check_idle))
            if self._enter is not None:
                ignore_error(self._worker.submit(self._run_enter, self._enter))
        self._sources[phase] = context.source
        self._num_phases = max(self._num_phases, phase + 1)

    async def check(self, step: int, error: BaseException) -> None:
        """Called on the event loop after `step` has failed with `error`. Raises `DeviceLost` if the device is lost.

        Waits for the verdict, in a bounded time. Until then the failure is not blamed on any request.
        """
        if self.guard is not None and not isinstance(error, StepSkipped):
            await self.guard.check(step, error)

    def _check_idle(self) -> None:
        """Checks the device, which may be lost although no step has failed."""
        assert self.guard is not None
        checking = self.guard.begin(max(0, self._last_forwarded), DeviceFault("it is gone"))
        checking.add_done_callback(self._tell_gone)

    def _tell_gone(self, checking: asyncio.Task[None]) -> None:
        lost = None if checking.cancelled() else checking.exception()
        if isinstance(lost, DeviceLost):
            for callback in self.on_gone:
                callback(lost)

    def _probe_limit_s(self) -> float:
        return max(PROBE_S, 2 * self.times.backlog_s)

    def _note_lost(self, lost: DeviceLost) -> None:
        if self._worker is not None:
            self._worker.abandon()
        for callback in self.on_lost:
            callback(lost)

    @property
    def is_sampling(self) -> bool:
        """Whether steps have a second phase."""
        return self._num_phases > SAMPLE

    def forward(self, grant: StepGrant, forward: Callable[[StepGrant], StepResult]) -> asyncio.Future[StepResult]:
        """Queues the first phase.

        Resolves to what `forward(grant)` returned; raises what it raised, or `StepSkipped`. Where there is a second
        phase and no task awaits this one, both results are delivered together. A task that first awaits this future
        after the second phase was submitted may get `ResultForgotten`. So logits are not kept alive while the next step
        computes.
        """
        if self._queue is None:
            assert self._worker is not None, "forward() before join(): a stage joins the device in its set-up"
            self._queue = StepQueue(self._worker, self._num_phases, grant.step)
        run = self._or_fault("device.forward", forward)
        assert self._queue is not None
        timed = partial(self._timed_forward, self._now_ns(), grant, run)
        if self.is_sampling:
            return self._queue.submit(grant.step, FORWARD, timed, ON_REQUEST)
        return self._submit(grant.step, FORWARD, timed, IMMEDIATELY)

    def is_forwarding(self, step: int) -> bool:
        """Whether the first phase of a submitted step has not ended."""
        return self._last_forwarded < step

    def sample(self, grant: StepGrant, sample: Callable[[StepGrant, StepResult], R]) -> asyncio.Future[R]:
        """Queues the second phase.

        Resolves to `sample(grant, logits)`; raises what either phase raised.
        """
        run = self._or_fault("device.sample", sample)
        when_done = IMMEDIATELY if self._call_before_computing is None else BEFORE_BLOCKING
        timed = partial(self._timed_sample, self._now_ns(), grant, run)
        result = self._submit(grant.step, SAMPLE, timed, when_done)
        if self.watch is not None and not self.is_async:
            self.watch.begin(grant.step, work_of(grant), result)
        return result

    def _submit(self, step: int, phase: int, run: Callable[[], R], when_done: WhenDone) -> asyncio.Future[R]:
        assert self._queue is not None, f"step {step} is sampled before its forward pass was submitted"
        result = self._queue.submit(step, phase, run, when_done)
        ignore_error(result)
        return result

    def _or_fault(self, name: str, run: Callable[..., R]) -> Callable[..., R]:
        assert self._env is not None
        return partial(fail, DeviceFault(name)) if self._env.fault(name) else run

    # -- on the thread

    def _run_enter(self, enter: Callable[[], object]) -> None:
        """Calls `enter`.

        If it raises, every step raises its error: a thread that is not set up runs no step.
        """
        try:
            enter()
        except BaseException as error:
            self._enter_error = error

    def _timed_forward(self, since_ns: int, grant: StepGrant, forward: Callable[[StepGrant], StepResult]) -> StepResult:
        """A phase's time starts at `since_ns` or at the end of the phase before, whichever is later."""
        self.times.begin(grant.step, max(since_ns, self._last_end_ns))
        try:
            return self._run_forward(grant, forward)
        finally:
            self._last_forwarded = grant.step
            self._end_phase(since_ns)
            if not self.is_async:
                self._note_forward(grant, self._last_end_ns)

    def _note_forward(self, grant: StepGrant, now_ns: int) -> None:
        """Records a forward pass that has ended."""
        forward_us = self.times.end(grant.step, now_ns, is_kept=self.is_sampling)
        if self._tracer is not None and self._tracer.enabled:
            num_rows = num_tokens = len(grant.slots)
            if not grant.is_decode:
                num_tokens = int(grant.num_tokens.sum())
            counts = (num_rows, num_tokens, forward_us)
            self._tracer.bind()(STEP_EXECUTED, self._sources[FORWARD], grant.step, *counts)

    def _timed_sample(self, since_ns: int, grant: StepGrant, sample: Callable[[StepGrant, StepResult], R]) -> R:
        result = None
        try:
            result = self._run_sample(grant, sample)
            return result
        finally:
            sample_us = self._end_phase(since_ns)
            if not self.is_async:
                self.times.end_sampling(grant.step, self._last_end_ns)
            if self._tracer is not None and self._tracer.enabled:
                times_us = (0 if self.is_async else sample_us, getattr(result, "grammar_us", 0))
                self._tracer.bind()(STEP_SAMPLED, self._sources[SAMPLE], grant.step, len(grant.slots), *times_us)

    def _end_phase(self, since_ns: int) -> int:
        began_ns, self._last_end_ns = max(since_ns, self._last_end_ns), self._now_ns()
        return (self._last_end_ns - began_ns) // 1000

    def _run_forward(self, grant: StepGrant, forward: Callable[[StepGrant], StepResult]) -> StepResult:
        self._logits = self._error = None
        try:
            if self._enter_error is not None:
                raise self._enter_error
            if self.guard is not None and self.guard.lost is not None:
                raise self.guard.lost
            void_generation = max(self._void_generation, self._void_at_completion)
            if grant.generation <= void_generation:
                raise StepSkipped(f"step {grant.step} is void like an earlier one of generation {void_generation}")
            self._logits = forward(grant)
        except BaseException as error:
            self._error = error
            self._void_generation = max(self._void_generation, grant.generation)
            raise
        return self._logits

    def _run_sample(self, grant: StepGrant, sample: Callable[[StepGrant, StepResult], R]) -> R:
        logits, error, self._logits, self._error = self._logits, self._error, None, None
        if error is not None:
            raise error
        try:
            return sample(grant, logits)
        except BaseException:
            self._void_generation = max(self._void_generation, grant.generation)
            raise


def fail(error: BaseException, *_: object) -> Any:
    """A phase that only raises `error`, for a step that must pass the queue without running."""
    raise error


def _call_on(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Calls `callback` on the loop, unless that is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


def _never() -> int:
    raise AssertionError("a step before join(): a stage joins the device in its set-up")
