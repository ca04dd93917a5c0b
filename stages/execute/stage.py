"""The execute stage: submits each granted step, and sends on a future of its logits.

The stage runs on the event loop. The model runs on the device thread, in the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from ...runtime.histogram import Histogram
from ...runtime.stage import Context, Crash, Outlet, Stage
from ..device.device import FORWARD, Device, RunsAhead, RunsForward, fail
from ..device.step_result import StepResult
from ..messages import Rates, StepGrant, StepLogits


class Execute(Stage[StepGrant, StepLogits]):
    """Submits forward passes without waiting: step n + 1 is queued while step n runs.

    Every grant becomes one `StepLogits`, in order. The future of a step that could not run carries its error, and
    sample turns it into a `StepVoid`. So each credit of the step loop comes back.

    `rates` are the measured rates of the device. They are sent to allocate with the first step.
    """

    outputs: ClassVar = {"out": StepLogits, "rates": Rates}
    on_crash: ClassVar[Crash] = Crash.RECOVER

    def __init__(self, runner: RunsForward, device: Device, rates: Rates | None = None) -> None:
        self.runner = runner
        self.device = device
        self._runs_ahead = runner if isinstance(runner, RunsAhead) else None
        self._untold = rates
        self._last_sent = -1  # step

    def busy_s(self, handle_s: float, now_s: float) -> float:
        """The device's time: `handle` only submits."""
        return self.device.times.forward_s(now_s)

    @property
    def service_us(self) -> Histogram:
        return self.device.times.forward_us

    async def setup(self, context: Context) -> None:
        self.device.join(context, FORWARD)

    async def handle(self, batch: Sequence[StepGrant], out: Outlet[Any]) -> None:
        if self._untold is not None:
            out.send(self._untold, port="rates")
            self._untold = None
        for grant in batch:
            if self._runs_ahead is not None and self.device.is_sampling:
                self._runs_ahead.offer(grant)
            self._run(grant, self.runner.forward, out)

    async def recover(self, batch: Sequence[StepGrant], error: BaseException, out: Outlet[Any]) -> None:
        """Voids the steps that were not submitted.

        A step that crashed is not tried again with the same rows.
        """
        for grant in batch:
            if grant.step > self._last_sent:
                self._run(grant, partial(fail, error), out)

    def _run(self, grant: StepGrant, forward: Callable[[StepGrant], StepResult], out: Outlet[Any]) -> None:
        logits = self.device.forward(grant, forward)
        self._last_sent = grant.step
        out.send(StepLogits(grant, logits))
