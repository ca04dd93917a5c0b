"""The execute stage: hands each granted step to the device, and passes on the promise of its logits.

Knows the order of steps. Refuses to know the model: that is the runner's, on the device thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from ...runtime.stage import Context, Crash, Outlet, Stage
from ..device.device import FORWARD, Device, Foresees, Forward, fail
from ..messages import Rates, StepGrant, StepLogits


class Execute(Stage[StepGrant, StepLogits]):
    """Submits forward passes and waits for none: step n + 1 is queued while n runs, and a model that foresees steps may
    begin it by itself.

    Every grant becomes one `StepLogits`, in order. One that could not be run carries its error, and sample makes it a
    void: so each credit of the step loop comes back.

    `rates` are what the device was measured at; allocate hears of them with the first step.
    """

    outputs: ClassVar = {"out": StepLogits, "rates": Rates}
    on_crash: ClassVar[Crash] = Crash.RECOVER

    def __init__(self, runner: Forward, device: Device, rates: Rates | None = None) -> None:
        self.runner = runner
        self.device = device
        self._foresees = runner if isinstance(runner, Foresees) else None
        self._untold = rates
        self._last_sent = -1  # step

    async def setup(self, context: Context) -> None:
        self.device.join(context, FORWARD)

    async def handle(self, batch: Sequence[StepGrant], out: Outlet[Any]) -> None:
        if self._untold is not None:
            out.send(self._untold, port="rates")
            self._untold = None
        for grant in batch:
            if self._foresees is not None and self.device.is_sampling:
                self._foresees.foresee(grant)
            self._run(grant, self.runner.forward, out)

    async def recover(self, batch: Sequence[StepGrant], error: BaseException, out: Outlet[Any]) -> None:
        """The steps that were not submitted are void: what crashed once is not tried again with the same rows."""
        for grant in batch:
            if grant.step > self._last_sent:
                self._run(grant, partial(fail, error), out)

    def _run(self, grant: StepGrant, forward: Callable[[StepGrant], Any], out: Outlet[Any]) -> None:
        logits = self.device.forward(grant, forward)
        self._last_sent = grant.step
        out.send(StepLogits(grant, logits))
