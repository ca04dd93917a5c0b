"""Tells a failed step from a lost device: the probe after a failure, and its verdict.

A step fails for many reasons, and most concern that step alone: too little memory, a bad input, a bug. But after some
errors (an illegal address, memory that fails, a hang) a GPU computes nothing more for this process, and each later step
would fail as well. The guard runs on the event loop, the probe on a thread of its own. Does not depend on torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

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
        self._has_begun = False  # the last probe; its thread may get no processor
        self._env: Env | None = None
        self._worker: Worker | None = None
        self._checking: asyncio.Task[None] | None = None

    def join(self, env: Env) -> None:
        """Starts the probe's thread. Idempotent. Raises `ThreadNotStarted` while the system allows none."""
        if self._worker is None:
            worker = env.worker("probe")
            worker.start()  # now: later there may be no thread
            self._env, self._worker = env, worker

    def begin(self, step: int, error: BaseException) -> asyncio.Task[None]:
        """Begins to check the device after `step` has failed with `error`; one check at a time.

        The task raises `DeviceLost` if the device is lost.
        """
        return self._begin(step, error, None, None)

    def begin_stuck(
        self, step: int, took_s: float, limit_s: float, has_ended: Callable[[], bool]
    ) -> asyncio.Task[None]:
        """As `begin`, for a step that has not ended after `took_s` seconds.

        The device must answer within `limit_s`. It is not lost if the step `has_ended` by then, or if no processor has
        begun the probe.
        """
        return self._begin(step, StepStuck(f"it has not ended for {took_s:.3g} s"), limit_s, has_ended)

    def _begin(
        self, step: int, error: BaseException, limit_s: float | None, has_ended: Callable[[], bool] | None
    ) -> asyncio.Task[None]:
        if self._checking is None or (self._checking.done() and self.lost is None):
            check = self._check(step, error, limit_s, has_ended)
            self._checking = asyncio.get_running_loop().create_task(check, name="device probe")
            ignore_error(self._checking)
        return self._checking

    async def check(self, step: int, error: BaseException) -> None:
        """As `begin`, and waits for the verdict."""
        await asyncio.shield(self.begin(step, error))

    def _begin_probe(self) -> None:
        """On the probe's thread."""
        self._has_begun = True
        self._probe()

    async def _check(
        self, step: int, error: BaseException, limit_s: float | None, has_ended: Callable[[], bool] | None
    ) -> None:
        assert self._worker is not None, "a step has failed before join(): a stage joins the device in its set-up"
        limit_s = self._limit_s() if limit_s is None else limit_s
        try:
            self._has_begun = False
            answer = self._worker.submit(self._begin_probe)
            ignore_error(answer)
            if await self._is_answered(answer, limit_s):
                answer.result()
                return
            if has_ended is not None and (has_ended() or not self._has_begun):
                return  # late, but it computes; or it was not asked
            cause = f"it has not answered for {limit_s:.3g} s"
        except WorkerClosed:
            self.is_closed = True
            return  # no verdict is needed
        except Exception as found:
            cause = first_line(found)
        advice = next((advice for part, advice in ADVICE if part in cause), OTHER_ADVICE)
        get_logger("millrace.stages").error(
            "device.lost", step=step, cause=cause, step_failed_with=loggable(error), advice=advice
        )
        self._worker.abandon()
        self.lost = DeviceLost(f"the device is lost since step {step} ({cause}); {advice}")
        self._on_lost(self.lost)
        raise self.lost

    async def _is_answered(self, answer: asyncio.Future[None], limit_s: float) -> bool:
        """Whether the answer comes within `limit_s` in which this process runs.

        While the event loop or the process stands still, the answer may not come through, and the probe may not run.
        """
        assert self._env is not None
        left_s, num_pauses = limit_s, 0
        while not answer.done() and left_s > 0:
            slice_s, began_s = min(SLICE_S, left_s), self._env.now()
            await asyncio.wait([answer], timeout=slice_s)
            if self._env.now() - began_s <= slice_s + PAUSE_S:
                left_s -= slice_s
                continue
            num_pauses += 1
            if num_pauses <= NUM_FRESH:
                left_s = limit_s
        return answer.done()


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
