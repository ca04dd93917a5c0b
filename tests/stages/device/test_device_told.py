"""When the event loop gets the result of a step of the device thread: once, and not before the next one is ready."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.runtime.env.env import LiveEnv
from millrace.runtime.stage import Context
from millrace.stages.device.device import FORWARD, SAMPLE, Device
from tests.runtime.workers.test_told import CountedLoop
from tests.stages.grants import grant

ROWS = [(0, 0, 1, True)]


def run(main: Callable[[Device, CountedLoop], Awaitable[None]], device: Device) -> None:
    """`main` with a device that both stages have joined."""

    async def joined(loop: CountedLoop) -> None:
        env = LiveEnv()
        context = cast(Context, SimpleNamespace(env=env, tracer=None, source=0))
        device.join(context, FORWARD)
        device.join(context, SAMPLE)
        await main(device, loop)
        await env.aclose()

    loop = CountedLoop()
    try:
        loop.run_until_complete(asyncio.wait_for(joined(loop), 60))
    finally:
        loop.close()


def sample(device: Device, step: int) -> asyncio.Future[Any]:
    return device.sample(grant(ROWS, step=step), lambda _, logits: f"tokens of {logits}")


@pytest.mark.parametrize("says_when", [False, True])
def test_a_step_wakes_the_loop_once(says_when: bool):
    async def main(device: Device, loop: CountedLoop) -> None:
        for step in range(5):
            logits = device.forward(grant(ROWS, step=step), lambda _, step=step: step)
            assert await sample(device, step) == f"tokens of {step}"
            assert logits.done()
        assert loop.num_woken == 5

    run(main, Device(call_before_computing=(lambda _: None) if says_when else None))


def test_a_step_is_told_when_the_next_one_is_about_to_compute():
    said: list[Callable[[], object]] = []

    async def main(device: Device, loop: CountedLoop) -> None:
        may_begin, is_on, may_compute, may_end = (threading.Event() for _ in range(4))

        def compute(_: object) -> None:
            is_on.set()
            may_compute.wait(20)
            said[0]()
            may_end.wait(20)

        device.forward(grant(ROWS, step=7), lambda _: may_begin.wait(20))
        first = sample(device, 7)
        device.forward(grant(ROWS, step=8), compute)
        second = sample(device, 8)
        may_begin.set()
        await asyncio.to_thread(is_on.wait)
        assert not first.done() and device.is_forwarding(8) and not device.is_forwarding(7)
        may_compute.set()
        assert await first == "tokens of True" and device.is_forwarding(8)
        may_end.set()
        assert await second == "tokens of None" and not device.is_forwarding(8)

    run(main, Device(call_before_computing=said.append))


@pytest.mark.parametrize("says_when", [False, True])
def test_a_step_is_told_though_the_next_one_does_not_get_to_its_computing(says_when: bool):
    """The first step fails, so the second is void and does not call back, and there is no third."""

    async def main(device: Device, loop: CountedLoop) -> None:
        complaints: list[Any] = []
        loop.set_exception_handler(lambda _, context: complaints.append(context))

        def fail(_: object) -> None:
            raise MemoryError("step 0")

        steps = []
        for step in range(2):
            device.forward(grant(ROWS, step=step), fail)
            steps.append(sample(device, step))
        found = await asyncio.gather(*steps, return_exceptions=True)
        assert [type(error).__name__ for error in found] == ["MemoryError", "StepSkipped"]
        del steps, found
        gc.collect()
        await asyncio.sleep(0)
        assert complaints == []

    run(main, Device(call_before_computing=(lambda _: None) if says_when else None))


def test_a_forward_pass_that_came_before_its_turn_is_told_like_any_other():
    """Step 1 is submitted while step 0 waits to be sampled."""

    async def main(device: Device, loop: CountedLoop) -> None:
        early = [device.forward(grant(ROWS, step=step), lambda _, step=step: step) for step in range(2)]
        assert await early[0] == 0
        tokens = [sample(device, step) for step in range(2)]
        assert await asyncio.gather(*early, *tokens) == [0, 1, "tokens of 0", "tokens of 1"]

    run(main, Device(call_before_computing=lambda _: None))
