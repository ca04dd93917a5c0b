"""Limits that count the time in which the loop ran: a standstill ends nothing, and each limit ends."""

from __future__ import annotations

import asyncio

import pytest

from millrace.runtime.env.awake_time import MAX_LATE_STEPS, NUM_STEPS, AwakeTimeout, AwakeTimer
from millrace.runtime.simulation.env import SimEnv
from millrace.runtime.simulation.testing import sim_test


@sim_test(seeds=2)
async def test_a_limit_ends_after_its_time_and_a_cancelled_one_never(env: SimEnv) -> None:
    ended: list[tuple[str, float]] = []
    began_s = env.now()
    AwakeTimer(8.0, lambda name: ended.append((name, env.now() - began_s)), "a")
    AwakeTimer(8.0, lambda: ended.append(("b", 0.0))).cancel()
    await asyncio.sleep(100.0)
    assert ended == [("a", pytest.approx(8.0))]


@sim_test(seeds=4)
async def test_a_standstill_costs_no_limit_its_time_and_leaves_a_step_at_least(env: SimEnv) -> None:
    for before_s in (0.5, 4.2, 7.9):
        ended: list[float] = []
        began_s = env.now()
        AwakeTimer(8.0, lambda ended=ended, began_s=began_s: ended.append(env.now() - began_s))  # type: ignore[misc]
        await asyncio.sleep(before_s)
        env.loop.stand_still(1_000.0)
        await asyncio.sleep(0.99)
        assert ended == []
        await asyncio.sleep(100.0)
        assert 1_008.0 <= ended[0] <= 1_009.0, "the step in which it began is repeated"


@sim_test(seeds=2)
async def test_a_loop_that_is_always_late_still_ends_its_limits(env: SimEnv) -> None:
    ended: list[float] = []
    AwakeTimer(8.0, lambda: ended.append(env.now()))
    for _ in range(NUM_STEPS + MAX_LATE_STEPS):
        assert ended == []
        await asyncio.sleep(0.01)
        env.loop.stand_still(10.0)
    await asyncio.sleep(0.01)
    assert len(ended) == 1


@sim_test(seeds=4)
async def test_a_timeout_leaves_what_comes_right_after_a_standstill(env: SimEnv) -> None:
    awaited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(31.0, awaited.set_result, 7)
    asyncio.get_running_loop().call_later(1.0, env.loop.stand_still, 30.0)
    async with AwakeTimeout(5.0):
        assert await awaited == 7
    with pytest.raises(TimeoutError):
        async with AwakeTimeout(5.0):
            await asyncio.sleep(5.1)
    async with AwakeTimeout(None):
        await asyncio.sleep(1e6)


@sim_test(seeds=2)
async def test_a_cancelled_wait_within_a_timeout_is_cancelled_and_no_timeout(env: SimEnv) -> None:
    async def wait() -> None:
        async with AwakeTimeout(5.0):
            await asyncio.sleep(60.0)

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(1.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
