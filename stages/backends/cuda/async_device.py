"""The asynchronous device: one thread submits steps, another one waits for them.

They are the device thread and the completion thread. What is submitted, and in which order, is in `step_submission.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from ....runtime.histogram import Histogram
from ....runtime.stage import Context
from ....runtime.workers.step_queue import chain, ignore_error
from ....runtime.workers.worker import Worker, WorkerClosed
from ...device.device import Device, StepSkipped
from ...device.device_guard import DeviceLost
from ...device.step_watch import work_of
from ...messages import StepGrant, StepTokens
from .step_submission import StepSubmitter, SubmittedStep


class AsyncDevice(Device):
    """As `Device`, for phases that return before the device has finished.

    The future of `sample` resolves or fails only when the step has ended on the device. Until then its blocks must not
    be reused. The model is `line.forward`, the sampler `line.sample`. The device thread calls `line.enter` first, so
    that device operations inside the phases are in order with the steps.
    """

    is_async: ClassVar[bool] = True

    def __init__(self, line: StepSubmitter) -> None:
        super().__init__(line.enter, probe=line.probe)
        self.line = line
        self._completion_worker: Worker | None = None

    @property
    def idle_gaps_us(self) -> Histogram:
        """Idle microseconds between two steps, over all steps so far."""
        return self.line.gaps.histogram

    def join(self, context: Context, phase: int) -> None:
        super().join(context, phase)
        if self._completion_worker is None:
            worker = context.env.worker("completion")
            worker.start()  # now, so that no step can fail for lack of a thread
            self._completion_worker = worker

    def sample(self, grant: StepGrant, sample: Callable[[StepGrant, Any], Any]) -> asyncio.Future[Any]:
        """Queues the second phase. Called on the event loop.

        Resolves to the step's tokens when the device runs nothing of the step any more. Raises, no earlier than that,
        what either phase or the device raised. A lost device may never come so far; see `on_lost`.
        """
        submitted = super().sample(grant, sample)
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        ignore_error(result)

        def hand_over(_: object) -> None:
            if submitted.cancelled() or result.done():
                result.cancel()
                return
            assert self._completion_worker is not None
            error = submitted.exception()
            if self.guard is not None and error is not None and not isinstance(error, StepSkipped):
                self.guard.begin(grant.step, error)  # now: the other thread waits for a device that may hang
            try:
                chain(self._completion_worker.submit(self._finish, grant, submitted), result)
            except WorkerClosed:  # shutdown: no task waits any more
                result.cancel()
            except BaseException as error:  # an error here would be the loop's, and the step would never be reported
                result.set_exception(error)

        submitted.add_done_callback(hand_over)
        if self.watch is not None:
            self.watch.begin(grant.step, work_of(grant), result)
        return result

    def _note_lost(self, lost: DeviceLost) -> None:
        super()._note_lost(lost)
        if self._completion_worker is not None:
            self._completion_worker.abandon()

    # -- on the completion thread

    def _finish(self, grant: StepGrant, submitted: asyncio.Future[SubmittedStep]) -> StepTokens:
        try:
            return self._wait(grant, submitted)
        finally:
            self._note_forward(grant, self._now_ns())

    def _wait(self, grant: StepGrant, submitted: asyncio.Future[SubmittedStep]) -> StepTokens:
        error = submitted.exception()
        if error is not None:
            try:
                self.line.drain()  # part of the step may have been submitted
            finally:
                raise error  # the first error, not the one that draining a failed device raises
        try:
            return submitted.result().wait()
        except BaseException:
            self._void_at_completion = max(self._void_at_completion, grant.generation)
            raise
