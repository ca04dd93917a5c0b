"""The guard of a device: which failures mean that the device is lost, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from millrace.runtime.env.log import captured_logs
from millrace.runtime.simulation.env import JobHangs
from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.run import run as simulate
from millrace.stages.device.device_guard import PROBE_S, DeviceGuard, DeviceLost, is_out_of_memory

ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`")


class Probe:
    """Raises each of `outcomes`, one a call; then returns."""

    def __init__(self, *outcomes: BaseException) -> None:
        self.outcomes, self.num_calls = list(outcomes), 0

    def __call__(self) -> None:
        self.num_calls += 1
        if self.outcomes:
            raise self.outcomes.pop(0)


def guarded(test: Callable[[DeviceGuard, SimEnv], Awaitable[Any]], probe: Probe) -> tuple[list[str], list[DeviceLost]]:
    """(log events, verdicts) of a test with a guard."""
    verdicts: list[DeviceLost] = []

    async def main(env: SimEnv) -> None:
        guard = DeviceGuard(probe, lambda: PROBE_S, verdicts.append)
        guard.join(env)
        await test(guard, env)
        await env.aclose()

    with captured_logs() as logs:
        simulate(main, seed=1, policy="fifo")
    return [record["event"] for record in logs], verdicts


def test_a_failure_on_a_device_that_answers_is_the_failure_of_its_step_alone() -> None:
    probe = Probe()

    async def test(guard: DeviceGuard, env: SimEnv) -> None:
        for step in range(3):
            await guard.check(step, MemoryError("out of memory"))
        assert guard.lost is None

    assert guarded(test, probe) == ([], []) and probe.num_calls == 3


def test_an_error_that_stays_is_told_once_with_its_step_its_cause_and_what_to_do() -> None:
    async def test(guard: DeviceGuard, env: SimEnv) -> None:
        checks = [asyncio.ensure_future(guard.check(step, KeyError("first"))) for step in (17, 18)]
        await asyncio.wait(checks)
        assert all(isinstance(check.exception(), DeviceLost) for check in checks)
        with pytest.raises(DeviceLost, match=r"lost since step 17 \(CUDA error: an illegal .*ed\); .*BLOCKING"):
            await guard.check(19, KeyError("later"))

    probe = Probe(ILLEGAL)
    events, verdicts = guarded(test, probe)
    assert events == ["device.lost"] and len(verdicts) == 1 and probe.num_calls == 1


def test_a_probe_that_does_not_return_within_its_limit_means_a_lost_device() -> None:
    async def test(guard: DeviceGuard, env: SimEnv) -> None:
        began = env.now()
        with pytest.raises(DeviceLost, match=r"it has not answered for 1.5 s\); it hangs: see dmesg"):
            await guard.check(3, RuntimeError("launch failed"))
        assert 1.5 <= env.now() - began < 2.0

    assert guarded(test, Probe(JobHangs()))[0] == ["device.lost"]


def answering(guard: DeviceGuard, env: SimEnv, when_s: float) -> None:
    """Has each probe begin at once, and its answer come at `when_s` or, after a pause, when it is over."""

    def submit(begin_probe: Callable[[], object]) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = env.loop.create_future()
        begin_probe()
        env.call_at(when_s, lambda: env.loop.call_soon(answer.set_result, None))
        return answer

    guard._worker.submit = submit  # type: ignore[union-attr, method-assign, assignment]


def pause(env: SimEnv, pause_s: float) -> None:
    """The event loop stands still; what was due meanwhile comes after it, in order."""
    over_s = env.loop._now + pause_s
    timers = sorted(env.loop._scheduled)
    for number, timer in enumerate(timers):
        timer._when = max(timer.when(), over_s + number * 1e-6)  # type: ignore[attr-defined]
    env.loop._scheduled[:] = timers
    env.loop._now = over_s


# The loop's thread alone, whose answer came meanwhile; the whole process, whose probe needs 0.2 s more after it.
@pytest.mark.parametrize(("pause_s", "answer_s"), [(1.5, 0.3), (2.0, 2.3), (0.9, 1.7)])
def test_a_pause_of_the_loop_or_the_process_is_no_hang_of_the_device(pause_s: float, answer_s: float) -> None:
    async def test(guard: DeviceGuard, env: SimEnv) -> None:
        answering(guard, env, env.now() + answer_s)
        check = guard.begin_stuck(5, 1.0, 0.9, lambda: False)
        await env.sleep(0.1)
        pause(env, pause_s)
        await env.sleep(3)
        assert check.done() and guard.lost is None

    assert guarded(test, Probe()) == ([], [])


@pytest.mark.parametrize(("num_pauses", "most_s"), [(0, 0.91), (1, 1.2), (20, 4.5)])
def test_a_device_that_hangs_is_told_in_spite_of_pauses(num_pauses: int, most_s: float) -> None:
    async def test(guard: DeviceGuard, env: SimEnv) -> None:
        began_s, paused_s = env.now(), 0.0
        answering(guard, env, began_s + 1000)
        check = guard.begin_stuck(5, 1.0, 0.9, lambda: False)
        for _ in range(num_pauses):
            await env.sleep(0.15)
            if check.done():
                break
            pause(env, 5)
            paused_s += 5
        await asyncio.wait([check])
        assert guard.lost is not None and 0.89 <= env.now() - began_s - paused_s <= most_s

    assert guarded(test, Probe())[0] == ["device.lost"]


def test_a_check_without_a_verdict_does_not_keep_the_env_from_closing() -> None:
    async def test(guard: DeviceGuard, env: SimEnv) -> None:
        check = guard.begin_stuck(5, 1.0, 0.9, lambda: True)
        await env.sleep(0.5)
        closing = asyncio.ensure_future(env.aclose())
        await env.sleep(1)
        assert check.done() and closing.done() and guard.lost is None

    assert guarded(test, Probe(JobHangs())) == ([], [])


@pytest.mark.parametrize("failed_after_s", [0.0, 0.5, 0.85, 3.0])
def test_a_failure_during_a_check_of_a_late_step_has_its_own_verdict(failed_after_s: float) -> None:
    async def test(guard: DeviceGuard, env: SimEnv) -> None:
        guard.begin_stuck(5, 1.0, 0.9, lambda: True)
        await env.sleep(failed_after_s)
        began_s = env.now()
        with pytest.raises(DeviceLost, match=r"lost since step 6 \(it has not answered for 1.5 s\)"):
            await guard.check(6, RuntimeError("launch failed"))
        assert 1.5 <= env.now() - began_s < 1.75

    assert guarded(test, Probe(JobHangs()))[0] == ["device.lost"]


def test_an_answer_from_before_a_failure_does_not_speak_for_it() -> None:
    async def test(guard: DeviceGuard, env: SimEnv) -> None:
        stuck = guard.begin_stuck(5, 1.0, 0.9, lambda: True)
        await asyncio.sleep(0)
        await guard.check(5, MemoryError())
        assert stuck.done() and guard.lost is None

    probe = Probe()
    assert guarded(test, probe) == ([], []) and probe.num_calls == 2


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (ILLEGAL, False),
        (KeyError("out of memory"), False),
    ],
)
def test_too_little_memory_is_known_by_type_and_by_text(error: BaseException, is_memory: bool) -> None:
    assert is_out_of_memory(error) == is_memory
