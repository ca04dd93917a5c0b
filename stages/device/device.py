"""The device as the stages see it: one thread that takes each step through its forward pass and then its sampling.

Knows order, and which steps are not to run any more. Refuses to know what a step computes, so it needs no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from ...runtime.env.env import Env
from ...runtime.histogram import Histogram
from ...runtime.stage import Context
from ...runtime.trace.tracer import EventKind, Tracer
from ...runtime.workers.step_queue import StepQueue, hush
from ...runtime.workers.worker import AT_ONCE, BEFORE_WAITING, IF_ASKED, Told, Worker
from ..messages import Started, StepGrant, StepTokens

R = TypeVar("R")
CallBefore = Callable[[Callable[[], object]], object]

FORWARD, SAMPLE = 0, 1  # the phases of a step
MOST_IN_FLIGHT = 64  # steps; engines have at most a few
STEP_EXECUTED, STEP_SAMPLED = int(EventKind.STEP_EXECUTED), int(EventKind.STEP_SAMPLED)


class Forward(Protocol):
    """A model, as the execute stage knows it."""

    def forward(self, grant: StepGrant) -> Any:
        """Runs one step. Called on the device thread, grant by grant in order, except for those that fell with an
        earlier one. Returns the handle of [L, V] logits that `Choose.sample` understands. See `Foresees`, too."""


@runtime_checkable
class Foresees(Protocol):
    """A model that may begin a step by itself when the one before is over, and choose its tokens with it."""

    def foresee(self, grant: StepGrant) -> None:
        """Hears on the loop of each step that is on its way to the device and then to a sampler, before `forward` is
        submitted. What `forward` returns may be a `Choice` in the place of logits. A step that falls with an earlier
        one may still run: the model sees to it that no later one is disturbed."""


class Choose(Protocol):
    """A sampler, as the sample stage knows it."""

    def prepare(self, started: Sequence[Started]) -> None:
        """Hears on the loop of sequences that begin with a step which is on its way to the device."""

    def sample(self, grant: StepGrant, logits: Any) -> StepTokens:
        """Chooses one token for each sampled row of the grant. Called on the device thread, after the step's forward
        pass and before the next one, unless the model has chosen; also when no row is sampled, for the sake of what the
        grant tells."""


class StepFell(Exception):
    """The step was not run: an earlier one of its generation, or a later generation, failed."""


class DeviceFault(Exception):
    """A fault point struck: the device fails as a kernel would fail."""


class Device:
    """Runs every step's phases in order, whatever order they are submitted in (see `StepQueue`).

    When a phase raises, its step is void, and the steps behind it with that generation or an older one are void with
    it: they raise `StepFell` instead of running. A grant of a higher generation runs again.
    Each step that was submitted to one phase must be submitted to all: the thread waits for it.
    """

    is_late: ClassVar[bool] = False  # whether it runs beside its thread, and is done with a step later than that is

    def __init__(
        self, enter: Callable[[], object] | None = None, call_before_computing: CallBefore | None = None
    ) -> None:
        """`enter` is what the thread calls first. `call_before_computing` is given what `forward` shall call when all
        is ready and the interpreter lock is about to be free: the outcome of the step before is told then, as the loop
        would keep the thread from getting ready."""
        self._enter = enter
        self._call_before_computing = call_before_computing
        self._worker: Worker | None = None
        self._env: Env | None = None
        self._queue: StepQueue | None = None
        self._num_phases = 0
        self._now_ns: Callable[[], int] = _never
        self._tracer: Tracer | None = None
        self._sources = [0, 0]  # of the stages, by phase, in the trace
        # the thread's own
        self._enter_error: BaseException | None = None
        self._last_end_ns = 0  # of a phase
        self._last_forwarded = -1  # step
        self._void_generation = -1
        self._logits: Any = None  # of the step that is between its phases
        self._error: BaseException | None = None

    @property
    def first_step(self) -> int:
        """Of those that were submitted; there has been one."""
        assert self._queue is not None, "no step was submitted yet"
        return self._queue.first_step

    @property
    def idle_gaps_us(self) -> Histogram | None:
        """How long it stood idle between two steps although there was work; None where its thread computes by itself,
        so that nothing else knows."""
        return None

    def join(self, context: Context, phase: int) -> None:
        """Says that a stage will submit each step to `phase`. Called in a stage's set-up; again changes nothing. A
        slice that ends at the logits has no second phase, and does not wait for one."""
        if self._worker is None:
            self._env, self._worker = context.env, context.env.worker("device")
            self._now_ns, self._tracer = context.env.now_ns, context.tracer
            if self._call_before_computing is not None:
                self._call_before_computing(self._worker.tell)
            if self._enter is not None:
                hush(self._worker.submit(self._run_enter, self._enter))
        self._sources[phase] = context.source
        self._num_phases = max(self._num_phases, phase + 1)

    @property
    def is_sampling(self) -> bool:
        """Whether steps have a second phase."""
        return self._num_phases > SAMPLE

    def forward(self, grant: StepGrant, forward: Callable[[StepGrant], Any]) -> asyncio.Future[Any]:
        """Queues the first phase. Resolves to what `forward(grant)` returned; raises what it raised, or `StepFell`.
        Where there is a second phase and nobody waits for this one, both are told together; who has not asked when the
        second is submitted may get `AskedTooLate`, so that logits are not kept for him while the next step computes."""
        if self._queue is None:
            assert self._worker is not None, "forward() before join(): a stage joins the device in its set-up"
            self._queue = StepQueue(self._worker, self._num_phases, grant.step)
        run = self._or_fault("device.forward", forward)
        assert self._queue is not None
        timed = partial(self._timed_forward, self._now_ns(), grant, run)
        if self.is_sampling:
            return self._queue.submit(grant.step, FORWARD, timed, IF_ASKED)
        return self._submit(grant.step, FORWARD, timed, AT_ONCE)

    def is_forwarding(self, step: int) -> bool:
        """Whether the first phase of a step that was submitted is not over."""
        return self._last_forwarded < step

    def sample(self, grant: StepGrant, sample: Callable[[StepGrant, Any], R]) -> asyncio.Future[R]:
        """Queues the second phase. Resolves to `sample(grant, logits)`; raises what either phase raised."""
        run = self._or_fault("device.sample", sample)
        told = AT_ONCE if self._call_before_computing is None else BEFORE_WAITING
        return self._submit(grant.step, SAMPLE, partial(self._timed_sample, self._now_ns(), grant, run), told)

    def _submit(self, step: int, phase: int, run: Callable[[], R], told: Told) -> asyncio.Future[R]:
        assert self._queue is not None, f"step {step} is sampled before its forward pass was submitted"
        result = self._queue.submit(step, phase, run, told)
        hush(result)
        return result

    def _or_fault(self, name: str, run: Callable[..., R]) -> Callable[..., R]:
        assert self._env is not None
        return partial(fail, DeviceFault(name)) if self._env.fault(name) else run

    # -- on the thread

    def _run_enter(self, enter: Callable[[], object]) -> None:
        """What it raises, each step raises: a thread that is not where its steps belong runs none."""
        try:
            enter()
        except BaseException as error:
            self._enter_error = error

    def _timed_forward(self, since_ns: int, grant: StepGrant, forward: Callable[[StepGrant], Any]) -> Any:
        """A phase takes the time from when it could begin, `since_ns` or when the one before had ended, to its end."""
        try:
            return self._run_forward(grant, forward)
        finally:
            self._last_forwarded = grant.step
            forward_us = self._end_phase(since_ns)
            if self._tracer is not None and self._tracer.enabled:
                num_rows = num_tokens = len(grant.slots)
                if not grant.is_decode:
                    num_tokens = int(grant.num_tokens.sum())
                counts = (num_rows, num_tokens, forward_us)
                self._tracer.bind()(STEP_EXECUTED, self._sources[FORWARD], grant.step, *counts)

    def _timed_sample(self, since_ns: int, grant: StepGrant, sample: Callable[[StepGrant, Any], R]) -> R:
        result = None
        try:
            result = self._run_sample(grant, sample)
            return result
        finally:
            sample_us = self._end_phase(since_ns)
            if self._tracer is not None and self._tracer.enabled:
                times_us = (sample_us, getattr(result, "grammar_us", 0))
                self._tracer.bind()(STEP_SAMPLED, self._sources[SAMPLE], grant.step, len(grant.slots), *times_us)

    def _end_phase(self, since_ns: int) -> int:
        began_ns, self._last_end_ns = max(since_ns, self._last_end_ns), self._now_ns()
        return (self._last_end_ns - began_ns) // 1000

    def _run_forward(self, grant: StepGrant, forward: Callable[[StepGrant], Any]) -> Any:
        self._logits = self._error = None
        try:
            if self._enter_error is not None:
                raise self._enter_error
            if grant.generation <= self._void_generation:
                raise StepFell(f"step {grant.step} fell with an earlier one of generation {self._void_generation}")
            self._logits = forward(grant)
        except BaseException as error:
            self._error = error
            self._note_void(grant)
            raise
        return self._logits

    def _run_sample(self, grant: StepGrant, sample: Callable[[StepGrant, Any], R]) -> R:
        logits, error, self._logits, self._error = self._logits, self._error, None, None
        if error is not None:
            raise error
        try:
            return sample(grant, logits)
        except BaseException:
            self._note_void(grant)
            raise

    def _note_void(self, grant: StepGrant) -> None:
        self._void_generation = max(self._void_generation, grant.generation)


def fail(error: BaseException, *_: object) -> Any:
    """A phase that does nothing but raise `error`: for a step whose turn must pass."""
    raise error


def _never() -> int:
    raise AssertionError("a step before join(): a stage joins the device in its set-up")
