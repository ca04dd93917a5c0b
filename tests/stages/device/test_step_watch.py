"""The watch over steps that never end and never fail: when it has the device checked, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from millrace.runtime.env.log import captured_logs
from millrace.runtime.simulation.env import JobHangs
from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.run import run as simulate
from millrace.stages.device.device_guard import PROBE_S, DeviceGuard, DeviceLost
from millrace.stages.device.step_watch import StepWatch, work_of
from millrace.stages.messages import BlockCopy, Direction
from tests.stages.grants import decode, grant, ints

Begin = Callable[..., "asyncio.Future[Any]"]


class Probed:
    """A device that answers, or hangs; and when it was asked and given up."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.hangs = hangs
        self.asked_s: list[float] = []
        self.told_s: list[float] = []
        self.verdicts: list[DeviceLost] = []
        self.env: SimEnv | None = None

    def __call__(self) -> None:
        assert self.env is not None
        self.asked_s.append(self.env.now())
        if self.hangs:
            raise JobHangs

    def note_lost(self, lost: DeviceLost) -> None:
        assert self.env is not None
        self.told_s.append(self.env.now())
        self.verdicts.append(lost)


def watched(device: Probed, test: Callable[[Begin, SimEnv], Awaitable[Any]], probe_s: float = 0.0) -> list[Any]:
    """Runs `test` with a function that begins a step. A probe takes `probe_s`. Returns the log."""

    async def main(env: SimEnv) -> None:
        device.env = env
        guard = DeviceGuard(device, lambda: PROBE_S, device.note_lost)
        guard.join(env)
        watch = StepWatch(guard, env)

        def begin(step: int = 0, num_tokens: int = 1) -> asyncio.Future[Any]:
            result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            watch.begin(step, num_tokens, result)
            return result

        await test(begin, env)
        assert guard._worker is not None
        guard._worker.abandon()  # a probe may never end
        await env.aclose()

    with captured_logs() as logs:
        simulate(main, seed=1, policy="fifo", worker_delay_s={"probe": (probe_s, probe_s)})
    return list(logs)


def test_steps_that_end_have_no_device_checked() -> None:
    async def test(begin: Begin, env: SimEnv) -> None:
        for step in range(20):
            first, second = begin(2 * step), begin(2 * step + 1)
            for result in (first, second):
                await env.sleep(0.9)
                result.set_result(None)
        await env.sleep(100)

    device = Probed()
    assert watched(device, test) == [] and device.asked_s == []


def test_a_device_that_hangs_in_a_step_is_lost_within_two_seconds_of_its_beginning() -> None:
    began_s = 0.0

    async def test(begin: Begin, env: SimEnv) -> None:
        nonlocal began_s
        begin(7).set_result(None)
        await env.sleep(5)
        first = begin(8)
        begin(9)
        await env.sleep(0.5)
        first.set_result(None)
        await asyncio.sleep(0)
        began_s = env.now()
        await env.sleep(10)

    device = Probed(hangs=True)
    (line,) = watched(device, test)
    assert device.told_s[0] - began_s <= 2.0 and len(device.verdicts) == 1
    assert (line["event"], line["step"], line["step_failed_with"]) == ("device.lost", 9, "it has not ended for 1 s")
    assert "since step 9 (it has not answered for 0.9 s); it hangs" in str(device.verdicts[0])


def test_a_device_that_answers_is_asked_less_and_less_while_the_host_is_slow() -> None:
    began_s = 0.0

    async def test(begin: Begin, env: SimEnv) -> None:
        nonlocal began_s
        result, began_s = begin(), env.now()
        await env.sleep(20)
        result.set_result(None)
        await env.sleep(0.9)
        begin().set_result(None)
        await env.sleep(50)

    device = Probed()
    assert watched(device, test) == []
    assert [asked_s - began_s for asked_s in device.asked_s] == pytest.approx([1, 2, 4, 8, 16], abs=0.01)


def test_a_step_that_ends_while_the_device_is_checked_is_only_late() -> None:
    async def test(begin: Begin, env: SimEnv) -> None:
        result = begin()
        await env.sleep(1.5)
        assert len(device.asked_s) == 1
        result.set_result(None)
        await env.sleep(10)

    device = Probed(hangs=True)
    assert watched(device, test) == [] and not device.verdicts


def test_a_probe_that_no_processor_has_begun_is_no_verdict() -> None:
    async def test(begin: Begin, env: SimEnv) -> None:
        begin()
        await env.sleep(5)

    device = Probed()
    assert watched(device, test, probe_s=0.95) == [] and len(device.asked_s) == 3


def test_a_hang_is_found_after_a_probe_that_began_late() -> None:
    async def test(begin: Begin, env: SimEnv) -> None:
        begin()
        await env.sleep(10)

    device = Probed(hangs=True)
    watched(device, test, probe_s=1.95)
    assert len(device.verdicts) == len(device.asked_s) == 1
    assert device.told_s[0] - device.asked_s[0] == pytest.approx(0.9, abs=0.11)


def test_a_hang_is_found_after_a_step_that_was_only_late() -> None:
    async def test(begin: Begin, env: SimEnv) -> None:
        began_s, first = env.now(), begin(1)
        begin(2)
        await env.sleep(1.5)
        first.set_result(None)
        await env.sleep(600)
        # The second step may take twice as long as the first, and the check 0.9 of that.
        assert device.told_s[0] - began_s == pytest.approx(1.5 + 3 + 2.7, abs=0.11)

    device = Probed(hangs=True)
    watched(device, test)
    assert len(device.asked_s) == 1 and "since step 2 (" in str(device.verdicts[0])


@pytest.mark.parametrize(("num_tokens", "usual_s", "asked_s"), [(1, 0, 1), (1024, 0, 4), (1, 3, 6), (257, 0.4, 1.004)])
def test_long_prompts_and_slow_devices_have_more_time(num_tokens: int, usual_s: float, asked_s: float) -> None:
    async def test(begin: Begin, env: SimEnv) -> None:
        before = begin(0, 8192)
        await env.sleep(usual_s)
        before.set_result(None)
        await asyncio.sleep(0)
        began_s = env.now()
        begin(1, num_tokens)
        await env.sleep(40)
        assert device.asked_s[0] - began_s == pytest.approx(asked_s, abs=0.01)

    device = Probed(hangs=True)
    watched(device, test)
    assert device.told_s[0] - device.asked_s[0] == pytest.approx(0.9 * asked_s, abs=0.01)


def test_steps_behind_and_copied_blocks_count_too() -> None:
    async def test(begin: Begin, env: SimEnv) -> None:
        began_s = env.now()
        copies = (BlockCopy(Direction.OUT, ints(1, 2, 3), ints(4, 5, 6)), BlockCopy(Direction.IN, ints(9), ints(8)))
        begin(0, 256)
        begin(1, work_of(replace(grant([(0, 0, 448, True)]), copies=copies)))
        begin(2, work_of(replace(decode(*range(200)), is_decode=True)))
        await env.sleep(20)
        assert device.asked_s[0] - began_s == pytest.approx((256 + 448 + 4 * 16) / 256, abs=0.01)

    device = Probed(hangs=True)
    watched(device, test)


def test_steps_that_fail_are_no_measure_of_how_long_a_step_takes() -> None:
    async def test(begin: Begin, env: SimEnv) -> None:
        failing = begin(0, 8192)
        await env.sleep(10)
        failing.set_exception(MemoryError())
        await asyncio.sleep(0)
        begin(1)
        await env.sleep(2)

    device = Probed(hangs=True)
    watched(device, test)
    assert len(device.verdicts) == 1
