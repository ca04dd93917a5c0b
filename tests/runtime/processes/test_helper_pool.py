"""Helper processes: answers in order, limits that hold, and another child when one ends."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from millrace.runtime.env.awake_time import LATE_S
from millrace.runtime.processes.helper_pool import HelperDied, HelperPool
from millrace.runtime.processes.helper_watch import LOOK_S, HelperStuck

ROOT = Path(__file__).parents[3]


def with_helpers(
    test: Callable[[HelperPool], Awaitable[None]], monkeypatch: pytest.MonkeyPatch, num: int = 1, idle_s: float = 20.0
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("MILLRACE_API_KEY", "secret")

    async def main() -> None:
        helpers = HelperPool("tests.runtime.answering", b"> ", num, idle_s)
        assert helpers.pids == [], "no request was sent yet"
        try:
            await test(helpers)
        finally:
            pids = helpers.pids
            await helpers.aclose()
        assert helpers.pids == []
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    asyncio.run(asyncio.wait_for(main(), 60.0))


async def refilled(helpers: HelperPool, ended: int) -> None:
    while not helpers.pids or ended in helpers.pids:  # noqa: ASYNC110 - a process has no event
        await asyncio.sleep(0.01)


@pytest.mark.slow
def test_a_job_that_breaks_a_limit_ends_its_child_and_the_next_one_has_another(monkeypatch) -> None:
    async def test(helpers: HelperPool) -> None:
        assert await helpers.ask(b"one") == b"> ONE"
        (first,) = helpers.pids
        assert await helpers.ask(b"grow") == b"no memory"
        assert helpers.pids == [first]
        told = {}
        for question in (b"spin", b"abort", b"leave"):
            with pytest.raises(HelperDied) as gone:
                await helpers.ask(question)
            told[question] = (gone.value.is_over_cpu, gone.value.is_crash)
            assert await helpers.ask(b"two") == b"> TWO"
            assert len(helpers.pids) == 1 and helpers.pids != [first]
        assert told == {b"spin": (True, False), b"abort": (False, True), b"leave": (False, False)}

    with_helpers(test, monkeypatch)


@pytest.mark.slow
def test_a_child_that_is_killed_is_replaced_at_once_and_no_secret_is_handed_on(monkeypatch) -> None:
    async def test(helpers: HelperPool) -> None:
        names = (await helpers.ask(b"environment")).decode().split()
        assert "PATH" in names and not [name for name in names if "MILLRACE" in name or "KEY" in name]
        (pid,) = helpers.pids
        asked = asyncio.ensure_future(helpers.ask(b"spin"))
        await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(HelperDied) as gone:
            await asked
        assert not gone.value.is_over_cpu and not gone.value.is_crash
        await refilled(helpers, pid)
        assert await helpers.ask(b"three") == b"> THREE"
        cancelled = asyncio.ensure_future(helpers.ask(b"spin"))
        await asyncio.sleep(0.05)
        (pid,) = helpers.pids
        cancelled.cancel()
        await refilled(helpers, pid)
        answers = await asyncio.gather(*(helpers.ask(b"%d" % i) for i in range(20)))
        assert answers == [b"> %d" % i for i in range(20)]

    with_helpers(test, monkeypatch)


@pytest.mark.slow
def test_a_child_that_is_about_to_be_replaced_has_ended_when_all_have(monkeypatch) -> None:
    async def test(helpers: HelperPool) -> None:
        assert await helpers.ask(b"one") == b"> ONE"
        (pid,) = helpers.pids
        asked = asyncio.ensure_future(helpers.ask(b"spin"))
        await asyncio.sleep(0)
        asked.cancel()
        while helpers.pids:  # noqa: ASYNC110 - from then on it is being ended
            await asyncio.sleep(0)
        await helpers.aclose()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    with_helpers(test, monkeypatch)


@pytest.mark.slow
def test_a_child_that_sleeps_over_its_job_is_ended_as_stuck_and_not_as_a_job_that_takes_long(monkeypatch) -> None:
    async def test(helpers: HelperPool) -> None:
        with pytest.raises(HelperStuck, match="it did nothing for 0.5 s"):
            await helpers.ask(b"sleep")
        assert await helpers.ask(b"two") == b"> TWO"

    with_helpers(test, monkeypatch, idle_s=0.5)


@pytest.mark.slow
def test_a_job_whose_child_ends_while_this_process_stands_still_is_tried_once_more(monkeypatch, tmp_path) -> None:
    async def test(helpers: HelperPool) -> None:
        assert await helpers.ask(b"one") == b"> ONE"
        question = b"leave once " + os.fsencode(tmp_path / "a")
        asked = asyncio.ensure_future(helpers.ask(question))
        await asyncio.sleep(0.01)  # it is sent
        time.sleep(LATE_S + LOOK_S)
        assert await asked == b"again"
        with pytest.raises(HelperDied):
            await helpers.ask(b"leave once " + os.fsencode(tmp_path / "b"))

    with_helpers(test, monkeypatch)
