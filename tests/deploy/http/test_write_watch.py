"""A write that its client does not read ends the connection; a standstill of this process does not."""

from __future__ import annotations

import asyncio

import pytest

from millrace.deploy.http.write_watch import WriteWatch
from millrace.runtime.env.awake_time import MAX_LATE_STEPS, NUM_STEPS
from millrace.runtime.simulation.env import SimEnv
from millrace.runtime.simulation.testing import sim_test


@sim_test(seeds=2)
async def test_a_write_that_waits_too_long_is_found_and_one_that_ends_is_not(env: SimEnv) -> None:
    stalls: list[float] = []
    watch = WriteWatch(8.0, lambda: stalls.append(env.now()))
    watch.start()
    for _ in range(10):
        watch.waits_since_s = env.now()
        await asyncio.sleep(7.0)
        watch.waits_since_s = None
    watch.waits_since_s = began_s = env.now()
    await asyncio.sleep(20.0)
    assert len(stalls) == 1 and 8.0 <= stalls[0] - began_s <= 9.0


@sim_test(seeds=2)
async def test_a_standstill_gives_no_write_up(env: SimEnv) -> None:
    stalls: list[float] = []
    watch = WriteWatch(8.0, lambda: stalls.append(env.now()))
    watch.start()
    watch.waits_since_s = env.now()
    await asyncio.sleep(6.5)
    for _ in range(3):
        env.loop.stand_still(100.0)
        await asyncio.sleep(0.3)
    assert stalls == []
    watch.waits_since_s = env.now()
    env.loop.stand_still(100.0)
    began_s = env.now()
    await asyncio.sleep(20.0)
    assert stalls == [pytest.approx(began_s + 8.0, abs=2.0)]
    watch.stop()


@sim_test(seeds=2)
async def test_a_loop_that_is_late_at_each_look_still_finds_a_stalled_write(env: SimEnv) -> None:
    stalls: list[float] = []
    watch = WriteWatch(8.0, lambda: stalls.append(env.now()))
    watch.start()
    watch.waits_since_s = began_s = env.now()
    for _ in range(100):
        await asyncio.sleep(0.9)
        env.loop.stand_still(2.0)
    assert len(stalls) == 1 and 30.0 <= stalls[0] - began_s <= (MAX_LATE_STEPS + NUM_STEPS + 1) * 3.0
