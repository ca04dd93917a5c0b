"""A clock that stands still while the process does not run."""

from __future__ import annotations

import asyncio

import pytest

from millrace.deploy.cli.chaos import awake_clock
from millrace.deploy.cli.chaos.awake_clock import LATE_S, TICK_S, AwakeClock


def test_time_in_which_the_process_did_not_run_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(awake_clock.time, "monotonic", lambda: now_s[0])
    clock = AwakeClock()
    began_s = clock.now()
    for _ in range(3):
        now_s[0] += 0.9 * LATE_S
        clock.now()
    assert clock.now() - began_s == pytest.approx(2.7 * LATE_S)
    now_s[0] += 40.0  # stopped
    assert clock.now() - began_s == pytest.approx(2.7 * LATE_S + TICK_S)
    assert clock.lost_s == pytest.approx(40.0 - TICK_S)
    now_s[0] += 0.5
    assert clock.now() - began_s == pytest.approx(2.7 * LATE_S + TICK_S + 0.5)


def test_a_wait_ends_with_what_it_waits_for_or_after_its_limit() -> None:
    async def main() -> None:
        clock, never = AwakeClock(), asyncio.get_running_loop().create_future()
        assert await clock.wait([asyncio.sleep(0.001), asyncio.sleep(0.0)], 60.0)
        assert not await clock.wait([never], 2 * TICK_S) and not never.cancelled()

    asyncio.run(main())
