"""A device that runs beside the host: its thread submits steps, another one waits for them and tells.

Knows threads. What is submitted, and in which order, is `step_submission.py`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from ....runtime.histogram import Histogram
from ....runtime.stage import Context
from ....runtime.workers.step_queue import chain, hush
from ....runtime.workers.worker import Worker, WorkerClosed
from ...device.device import Device
from ...messages import StepGrant, StepTokens
from .step_submission import Step, StepLine


class LateDevice(Device):
    """As `Device`, for phases that return before the device is done: `sample` resolves when the step is over, and so
    does what a step has failed by. Until then its blocks are not to be used again.

    The model is `line.forward`, the sampler `line.sample`. Its thread enters the line first: what phases ask of the
    device by themselves is in order with the steps.
    """

    is_late: ClassVar[bool] = True

    def __init__(self, line: StepLine) -> None:
        super().__init__(line.enter)
        self.line = line
        self._teller: Worker | None = None

    @property
    def idle_gaps_us(self) -> Histogram:
        """Microseconds between two steps, of all steps so far."""
        return self.line.gaps.histogram

    def join(self, context: Context, phase: int) -> None:
        super().join(context, phase)
        if self._teller is None:
            self._teller = context.env.worker("completion")

    def sample(self, grant: StepGrant, sample: Callable[[StepGrant, Any], Any]) -> asyncio.Future[Any]:
        """Queues the second phase. Resolves to the step's tokens when nothing of the step runs any more; raises what
        either phase raised, or the device itself, no earlier."""
        submitted = super().sample(grant, sample)
        told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        hush(told)

        def hand_over(_: object) -> None:
            if submitted.cancelled() or told.done():
                told.cancel()
                return
            assert self._teller is not None
            try:
                chain(self._teller.submit(self._finish, grant, submitted), told)
            except WorkerClosed:  # everything ends: nobody waits any more
                told.cancel()

        submitted.add_done_callback(hand_over)
        return told

    # -- on the telling thread

    def _finish(self, grant: StepGrant, submitted: asyncio.Future[Step]) -> StepTokens:
        error = submitted.exception()
        if error is not None:
            try:
                self.line.drain()  # a part of it may have been submitted
            finally:
                raise error  # and not what draining a device that failed says again
        try:
            return submitted.result().wait()
        except BaseException:
            self._note_void(grant)
            raise
