"""Tells a failed step from a lost device: the probe after a failure, and its verdict.

A step fails for many reasons, and most concern that step alone: too little memory, a bad input, a bug. But after some
errors (an illegal address, memory that fails, a hang) a GPU computes nothing more for this process, and each later step
would fail as well. The guard runs on the event loop, the probe on a thread of its own. Does not depend on torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from ...runtime.crash_recovery import FatalError
from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ...runtime.workers.step_queue import ignore_error
from ...runtime.workers.worker import Worker, WorkerClosed

PROBE_S = 1.5  # in which a device must answer; health is told within 2 s of a failure
SLICE_S = 0.1  # of the wait for an answer
PAUSE_S = 0.2  # a slice that ends so much too late was a pause of the event loop or of the process
NUM_FRESH = 3  # pauses of a check after which the device's time begins anew; later ones are only not counted

# Part of an error's text -> what to do about it. The first that fits counts.
ADVICE = (
    ("rank ", "this process shares the model with others, which have ended: see ranks.ended in the log"),
    ("out of memory", "lower gpu_memory_utilization, so that drivers and kernels find memory"),
    ("ECC", "its memory is broken: see nvidia-smi -q -d ECC, then reset or replace the GPU"),
    ("has not answered", "it hangs: see dmesg for an Xid, then reset the GPU"),
    ("timed out", "its driver limits the time of a kernel: use a GPU without a display"),
    ("illegal", "a kernel is wrong: start with CUDA_LAUNCH_BLOCKING=1 to find it, and report it"),
    ("misaligned", "a kernel is wrong: start with CUDA_LAUNCH_BLOCKING=1 to find it, and report it"),
    ("assert", "a kernel is wrong: start with CUDA_LAUNCH_BLOCKING=1 to find it, and report it"),
)
OTHER_ADVICE = "see dmesg for an Xid, and nvidia-smi for the GPU's state"


class StepStuck(Exception):
    """A step that does not end. It is the cause of a check, and never raised."""


class DeviceLost(FatalError):
    """The device computes nothing more for this process. The text says since which step, why, and what to do."""


@dataclass(frozen=True, slots=True, eq=False)
class _Cause:
    """Why the device is checked."""

    step: int
    error: BaseException
    limit_s: float
    has_ended: Callable[[], bool] | None  # of a step that does not end; None: the step has failed


@dataclass(slots=True, eq=False)
class _Asked:
    """A call of the probe. While it has no answer, later checks wait for it, as its thread is not free."""

    cause: _Cause
    answer: asyncio.Future[None] = field(init=False)
    has_begun: bool = False  # set by the probe's thread, which may get no processor


class DeviceGuard:
    """Decides after a failed step, or during one that does not end, whether the device is lost.

    `probe` blocks until the device has done all earlier work and some new, tiny work; it raises the device's error.
    `limit_s` is the time that it may take: more means a hang. Pauses of the event loop or of the process do not count.
    `on_lost` is called once, with the verdict.
    """

    def __init__(
        self, probe: Callable[[], object], limit_s: Callable[[], float], on_lost: Callable[[DeviceLost], object]
    ) -> None:
        self.lost: DeviceLost | None = None  # the verdict, for good
        self.is_closed = False  # shutdown: a check found no worker any more
        self._probe, self._limit_s, self._on_lost = probe, limit_s, on_lost
        self._env: Env | None = None
        self._worker: Worker | None = None
        self._checking: asyncio.Task[None] | None = None
        self._cause: _Cause | None = None  # of the last check
        self._asked: _Asked | None = None  # the last call of the probe

    def join(self, env: Env) -> None:
        """Starts the probe's thread. Idempotent. Raises `ThreadNotStarted` while the system allows none."""
        if self._worker is None:
            worker = env.worker("probe")
            worker.start()  # now: later there may be no thread
            self._env, self._worker = env, worker

    def begin(self, step: int, error: BaseException) -> asyncio.Task[None]:
        """Begins to check the device after `step` has failed with `error`; one check at a time.

        A check of a step that does not end becomes one of this failure, with at least its time. The task raises
        `DeviceLost` if the device is lost.
        """
        return self._begin(_Cause(step, error, self._limit_s(), None))

    def begin_stuck(
        self, step: int, took_s: float, limit_s: float, has_ended: Callable[[], bool]
    ) -> asyncio.Task[None]:
        """As `begin`, for a step that has not ended after `took_s` seconds.

        The device must answer within `limit_s`, from when a processor has begun the probe. If the step `has_ended` by
        then, the device is not lost; if it still has not answered in the time of a later check, it is.
        """
        return self._begin(_Cause(step, StepStuck(f"it has not ended for {took_s:.3g} s"), limit_s, has_ended))

    def _begin(self, cause: _Cause) -> asyncio.Task[None]:
        if self._checking is None or (self._checking.done() and self.lost is None):
            self._cause = cause
            self._checking = asyncio.get_running_loop().create_task(self._check(), name="device probe")
            ignore_error(self._checking)
        elif (
            not self._checking.done()
            and self._cause is not None
            and self._cause.has_ended is not None
            and (cause.has_ended is None or self._cause.has_ended())
        ):
            self._cause = cause  # the running check goes on with it
        return self._checking

    async def check(self, step: int, error: BaseException) -> None:
        """As `begin`, and waits for the verdict."""
        await asyncio.shield(self.begin(step, error))

    def _ask(self, cause: _Cause) -> _Asked:
        """The call of the probe that has no answer yet, else a new one. Raises `WorkerClosed`."""
        if self._asked is not None and not self._asked.answer.done():
            return self._asked
        assert self._worker is not None
        asked = _Asked(cause)

        def probe() -> None:
            asked.has_begun = True
            self._probe()

        asked.answer = self._worker.submit(probe)
        ignore_error(asked.answer)
        self._asked = asked
        return asked

    async def _check(self) -> None:
        """Asks until an answer fits the cause, which a failure may replace meanwhile."""
        assert self._worker is not None, "a step has failed before join(): a stage joins the device in its set-up"
        while True:
            assert self._cause is not None
            try:
                asked = self._ask(self._cause)
                is_answered = await self._is_answered(asked)
                if asked.answer.cancelled():
                    raise WorkerClosed("the probe's worker was closed before it asked the device")
                if is_answered:
                    asked.answer.result()
            except WorkerClosed:
                self.is_closed = True
                return  # no verdict is needed
            except Exception as found:
                raise self._give_up(self._cause, first_line(found)) from None
            if not is_answered:
                if self._cause.has_ended is None or not self._cause.has_ended():
                    raise self._give_up(self._cause, f"it has not answered for {self._cause.limit_s:.3g} s")
                self._worker.abandon()  # its thread may never be free again
                return  # late, but it computes; a later check goes on with this question
            if self._cause.has_ended is not None or asked.cause is self._cause:
                return

    def _give_up(self, of: _Cause, cause: str) -> DeviceLost:
        """Tells the verdict."""
        assert self._worker is not None
        advice = next((advice for part, advice in ADVICE if part in cause), OTHER_ADVICE)
        get_logger("millrace.stages").error(
            "device.lost", step=of.step, cause=cause, step_failed_with=loggable(of.error), advice=advice
        )
        self._worker.abandon()
        self.lost = DeviceLost(f"the device is lost since step {of.step} ({cause}); {advice}")
        self._on_lost(self.lost)
        return self.lost

    async def _is_answered(self, asked: _Asked) -> bool:
        """Whether the answer comes within the cause's limit, in which this process runs and the probe has begun.

        While the event loop or the process stands still, the answer may not come through, and the probe may not run.
        """
        assert self._env is not None
        cause: _Cause | None = None
        limit_s, left_s, num_pauses = 0.0, 0.0, 0
        while not asked.answer.done():
            if cause is not self._cause:
                cause = self._cause
                assert cause is not None
                limit_s = cause.limit_s
                left_s = max(left_s, limit_s)
            if left_s <= 0:
                return False
            slice_s, began_s, had_begun = min(SLICE_S, left_s), self._env.now(), asked.has_begun
            await asyncio.wait([asked.answer], timeout=slice_s)
            if self._env.now() - began_s <= slice_s + PAUSE_S:
                left_s -= slice_s if had_begun or asked.has_begun else 0
                continue
            num_pauses += 1
            if num_pauses <= NUM_FRESH:
                left_s = max(left_s, limit_s)
        return True


def first_line(error: BaseException) -> str:
    """The first line of an error's text; torch's errors of CUDA go on with advice for developers."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def loggable(error: BaseException) -> str:
    """What may be logged of a step's error: a device's own text, else the type, as an exception may quote a prompt."""
    text = first_line(error)
    if isinstance(error, StepStuck):
        return text
    is_of_device = text.startswith("CUDA") or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return text if is_of_device else type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had too little memory for what raised `error`: torch's error, or a library's.

    Also true of an error that was raised while such an error was handled, as by the end of a capture.
    """
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    if isinstance(error, RuntimeError) and any(part in str(error) for part in ("out of memory", "ALLOC_FAILED")):
        return True
    earlier = error.__cause__ or error.__context__
    return earlier is not None and is_out_of_memory(earlier)
