"""The sample stage: chooses each step's tokens on the device, and reports them.

The stage runs on the event loop. The sampler runs on the device thread, except `Sampler.prepare`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ...runtime.env.log import get_logger
from ...runtime.histogram import STAGE_BOUNDS_US, Histogram
from ...runtime.stage import Context, Crash, Outlet, Stage
from ...runtime.trace.tracer import EventKind
from ..array_checks import num_true
from ..device.device import MOST_IN_FLIGHT, SAMPLE, ChoosesTokens, Device, StepSkipped, fail
from ..device.device_guard import DeviceLost, is_out_of_memory, loggable
from ..messages import FinishReason, StepDone, StepGrant, StepLogits, StepTokens, StepVoid
from .prefill_progress import PrefillWatch
from .step_pace import StepPace

STEP_DONE = int(EventKind.STEP_DONE)

log = get_logger("millrace.stages")

TakesFailedLoads = Callable[[int], Mapping[str, Exception]]


def _no_loads(step: int) -> Mapping[str, Exception]:
    return {}


class Sample(Stage[StepLogits, StepTokens]):
    """Turns every `StepLogits` into exactly one `StepDone` or `StepVoid`, in order.

    They go to `feedback`, whatever fails. The credits of the step loop depend on this. The message is sent when the
    device has finished the step, or at least runs no later step before it has. So the receiver may reuse blocks.

    On an asynchronous device a step is submitted when it arrives, whatever is in flight: the device never waits for
    this stage between two steps. Each step waits in a task of its own, first for its result, then for its turn to be
    reported. A device that computes on its own thread gains nothing from that, so its steps are handled one batch at a
    time, with less overhead.

    A finished step also becomes a `StepTokens` on `out`, unless that would be empty. After a void step, steps of the
    same or an older generation are void too.
    """

    outputs: ClassVar = {"out": StepTokens, "feedback": StepDone | StepVoid}
    on_crash: ClassVar[Crash] = Crash.RECOVER

    def __init__(self, sampler: ChoosesTokens, device: Device, take_failed_loads: TakesFailedLoads = _no_loads) -> None:
        """`take_failed_loads` returns which adapters a finished step could not load, and why, by digest."""
        self.sampler = sampler
        self.device = device
        self._take_failed_loads = take_failed_loads
        self._watch = PrefillWatch()
        self._pace = StepPace()
        self._current: dict[int, StepLogits] = {}  # by step: received and not reported
        self._batch: Sequence[StepLogits] = ()  # the last one received, whose time is estimated as a whole
        self._results: dict[int, asyncio.Future[StepTokens]] = {}  # by step: submitted and not reported
        self._turns: dict[int, asyncio.Future[None]] = {}  # by step: resolves when all earlier steps are reported
        self._next: int | None = None  # step to report next; None: none has arrived
        self._last_reported = -1  # step
        self._void_generation = -1
        self._context: Context | None = None
        self._began_s = 0.0  # when the device could start the step that is reported next
        self._ended_s = 0.0  # when the result of the last step came
        self._service_us = Histogram(STAGE_BOUNDS_US)
        self._waited_s = 0.0  # for steps that are reported
        self._waits_since_s: float | None = None  # since when it waits for the step to report next

    @property
    def concurrency(self) -> int | None:
        """As many steps as may ever be in flight, on an asynchronous device."""
        return MOST_IN_FLIGHT if self.device.is_async else None

    def busy_s(self, handle_s: float, now_s: float) -> float:
        """Without the waits for the device, but for its sampling."""
        return handle_s - self._waited_s - self._waiting_s(now_s)

    @property
    def service_us(self) -> Histogram:
        """The time to sample a step."""
        return self._service_us

    async def setup(self, context: Context) -> None:
        self._context = context
        self.device.join(context, SAMPLE)
        if self._fail_pending not in self.device.on_lost:
            self.device.on_lost.append(self._fail_pending)

    async def handle(self, batch: Sequence[StepLogits], out: Outlet[StepTokens]) -> None:
        self._batch = batch
        for item in batch:
            self._take(item)
            self.sampler.prepare(item.grant.started)
            self._submit(item.grant, self.sampler.sample)
        for item in batch:
            await self._answer(item.grant, out)

    async def recover(self, batch: Sequence[StepLogits], error: BaseException, out: Outlet[StepTokens]) -> None:
        """Voids the steps that were not reported.

        Submits them first: the device thread must not wait for them.
        """
        for item in batch:
            step = item.grant.step
            if step > self._last_reported:
                self._take(item)
                if step not in self._results:
                    self._submit(item.grant, partial(fail, error))
                await self._answer(item.grant, out, crash=error)
            elif step == self._next:
                await out.flush()
                self._pass_turn(step)

    @property
    def expected_s(self) -> float:
        items = {item.grant.step: item for item in self._batch} | self._current
        return sum(self._pace.expect_s(item.grant.num_computed) for item in items.values())

    @property
    def waits_for(self) -> str | None:
        """The execute stage, while the forward pass of the first pending step is running."""
        return "execute" if self._current and self.device.is_forwarding(min(self._current)) else None

    def _take(self, item: StepLogits) -> None:
        assert self._context is not None
        if self._next is None:
            self._next = self.device.first_step
        if not self._current:
            self._began_s = max(self._began_s, self._context.env.now())
        self._current[item.grant.step] = item

    def _submit(self, grant: StepGrant, sample: Callable[[StepGrant, Any], StepTokens]) -> None:
        self._results[grant.step] = self.device.sample(grant, sample)

    async def _answer(self, grant: StepGrant, out: Outlet[StepTokens], crash: BaseException | None = None) -> None:
        """Waits for the step's turn and for the device, and reports the result.

        With a `crash`, the step is void. Raises `DeviceLost` if the step has failed because the device is lost.
        """
        if grant.step != self._next:
            await self._turn(grant.step)
        assert self._context is not None
        tokens, error, now = None, crash, self._context.env.now
        since_s = self._waits_since_s = now()
        try:
            tokens = await self._results[grant.step]
        except Exception as failure:  # any error of the device concerns this step, not this stage
            error = crash or failure
        finally:
            self._ended_s = now()
            waited_s = self._waiting_s(self._ended_s)
            self._waited_s, self._waits_since_s = self._waited_s + waited_s, None
            self.device.times.forget(grant.step)
        if error is not None:
            await self.device.check(grant.step, error)
        self._watch.take_note(grant)
        if tokens is None or error is not None or grant.generation <= self._void_generation:
            self._report_void(grant, error, out)
        else:
            self._report_done(grant, tokens, out)
        self._service_us.observe(int(1e6 * (self._ended_s - since_s - waited_s)))  # never below 0: see `_waiting_s`
        await out.flush()
        self._pass_turn(grant.step)

    def _fail_pending(self, lost: DeviceLost) -> None:
        for result in self._results.values():
            if not result.done():
                result.set_exception(lost)

    def _waiting_s(self, now_s: float) -> float:
        """Seconds up to now that it has waited for the step to report next.

        The time in which the device's thread sampled is not among them.
        """
        if (since_s := self._waits_since_s) is None or self._next is None:
            return 0.0
        sampled_s = 0.0 if self.device.is_async else self.device.times.sampled_s(self._next, since_s, now_s)
        return max(0.0, now_s - since_s - sampled_s)

    async def _turn(self, step: int) -> None:
        """Waits until all earlier steps are reported."""
        self._turns[step] = asyncio.get_running_loop().create_future()
        await self._turns[step]

    def _pass_turn(self, step: int) -> None:
        del self._current[step], self._results[step]
        self._next = step + 1
        turn = self._turns.pop(step + 1, None)
        if turn is not None and not turn.done():
            turn.set_result(None)

    def _report_void(self, grant: StepGrant, error: BaseException | None, out: Outlet[StepTokens]) -> None:
        is_already_void = grant.generation <= self._void_generation
        self._void_generation = max(self._void_generation, grant.generation)
        out.send(StepVoid(grant.step, grant.generation, None if is_already_void else error), port="feedback")
        self._failed_loads(grant)  # they are loaded again
        self._last_reported = grant.step
        self._step_s()  # so that its time is not counted for the next step
        if error is not None and not is_already_void and not isinstance(error, StepSkipped):
            kind = "out_of_memory" if is_out_of_memory(error) else type(error).__name__
            size = {"num_rows": len(grant.slots), "num_tokens": grant.num_computed}
            log.warning("step.failed", step=grant.step, kind=kind, reason=loggable(error), **size)
        self._trace_void(grant, error)

    def _report_done(self, grant: StepGrant, tokens: StepTokens, out: Outlet[StepTokens]) -> None:
        began_s, step_s = self._began_s, self._step_s()
        done = _done(grant, tokens, int(step_s * 1e6), self._failed_loads(grant))
        out.send(done, port="feedback")  # first: the next step waits for it
        self._last_reported = grant.step
        progress = self._watch.done(grant)
        if tokens.started or progress:
            tokens = replace(tokens, began_s=began_s, progress=progress)
        self._note_done(grant, done, step_s)
        if len(tokens.slots) or tokens.started or tokens.prompt_logprobs or tokens.pooled or progress:
            out.send(tokens)

    def _failed_loads(self, grant: StepGrant) -> tuple[str, ...]:
        """The adapters that a finished step could not load, by digest; logs each with its error."""
        if not grant.adapter_loads:
            return ()
        failed = self._take_failed_loads(grant.step)
        for digest, error in failed.items():
            kind = "out_of_memory" if is_out_of_memory(error) else type(error).__name__
            log.warning("adapter.load_failed", step=grant.step, digest=digest, kind=kind, reason=loggable(error))
        return tuple(failed)

    def _step_s(self) -> float:
        """Seconds that the step which has ended took."""
        began_s, self._began_s = self._began_s, self._ended_s
        return self._began_s - began_s

    def _note_done(self, grant: StepGrant, done: StepDone, step_s: float) -> None:
        """Records the step's time in the trace and in the step pace."""
        assert self._context is not None
        tracer = self._context.tracer
        self._pace.note(grant.num_computed, step_s)
        if tracer.enabled:
            num_finished = num_true(done.is_finished)
            tracer.bind()(STEP_DONE, self._context.source, done.step, len(done.slots), num_finished, done.took_us)

    def _trace_void(self, grant: StepGrant, error: BaseException | None) -> None:
        assert self._context is not None
        tracer, source = self._context.tracer, self._context.source
        reason = tracer.source(type(error).__name__)
        tracer.emit(EventKind.STEP_VOID, source, grant.step, len(grant.slots), reason)


def _done(grant: StepGrant, tokens: StepTokens, took_us: int, failed_loads: tuple[str, ...]) -> StepDone:
    if tokens.pooled:
        tokens = _with_rows_of_pooled(tokens)
    return StepDone(
        step=tokens.step,
        slots=tokens.slots,
        sequence_ids=tokens.sequence_ids,
        places=tokens.places,
        token_ids=tokens.token_ids,
        is_finished=tokens.finishes.astype(np.bool_),
        most_tokens=1 if grant.drafts is None else 1 + int(grant.drafts.counts.max()),
        took_us=took_us,
        failed_loads=failed_loads,
    )


def _with_rows_of_pooled(tokens: StepTokens) -> StepTokens:
    """Adds a row for each pooled sequence, for the scheduler.

    The sequence ends with a token whose id means nothing.
    """
    slots = np.array([*tokens.pooled], np.intp)
    nothing = np.zeros(len(slots), np.intp)
    ids = [pooled.sequence_id for pooled in tokens.pooled.values()]
    return replace(
        tokens,
        slots=np.concatenate([tokens.slots, slots]),
        sequence_ids=np.concatenate([tokens.sequence_ids, np.array(ids, np.int64)]),
        places=np.concatenate([tokens.places, nothing]),
        token_ids=np.concatenate([tokens.token_ids, nothing]),
        finishes=np.concatenate([tokens.finishes, np.full(len(slots), FinishReason.STOP, np.int8)]),
    )
