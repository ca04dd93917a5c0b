"""What ends a job of a helper: that it sleeps, and not that the machine gives it no time. The time here is virtual."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from millrace.runtime.processes.helper_watch import MOST_FACTOR, HelperStuck, HelperWatch, activity_of
from millrace.runtime.simulation.env import SimEnv
from millrace.runtime.simulation.run import run

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
IDLE_S = 10.0
BEGAN = "print(flush=True)\n"


def child(code: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", BEGAN + code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    yield from child("import time; time.sleep(1000)")


def wait_for_state(pid: int, state: str) -> None:
    end_s = time.monotonic() + 60.0
    while (found := activity_of(pid)) is None or found.state != state:
        assert time.monotonic() < end_s, found
        time.sleep(0.001)


def stuck_after(pid: int, standstill_s: float = 0.0) -> tuple[float, str, bool]:
    """Virtual seconds until a job that never ends is given up, what is said of it, and whether time stood still."""

    async def main(env: SimEnv) -> tuple[float, str, bool]:
        watch, began_s = HelperWatch(pid, IDLE_S), env.now()
        if standstill_s:
            env.loop.call_later(5.1, env.loop.stand_still, standstill_s)
        with pytest.raises(HelperStuck) as stuck:
            async with watch:
                await asyncio.Future()
        return env.now() - began_s, str(stuck.value), watch.stood_still

    return run(main, seed=1).value


def test_a_helper_that_sleeps_is_stuck_after_its_limit_and_a_standstill_adds_to_it(sleeper) -> None:
    wait_for_state(sleeper.pid, "S")
    took_s, text, stood_still = stuck_after(sleeper.pid)
    assert IDLE_S <= took_s <= IDLE_S + 0.5 and text == "it did nothing for 10 s" and not stood_still
    took_s, _, stood_still = stuck_after(sleeper.pid, standstill_s=1_000.0)
    assert 1_000.0 + IDLE_S - 0.5 <= took_s <= 1_000.0 + IDLE_S + 0.5 and stood_still


def test_a_helper_that_gets_no_cpu_is_not_taken_for_one_that_does_nothing() -> None:
    for spinner in child("while True: pass"):  # in virtual time it hardly uses any
        took_s, text, _ = stuck_after(spinner.pid)
        assert took_s == pytest.approx(MOST_FACTOR * IDLE_S) and text.endswith("its process is in state R")


def test_a_helper_that_is_stopped_or_unknown_gets_more_time_too_but_not_any(sleeper) -> None:
    os.kill(sleeper.pid, signal.SIGSTOP)
    wait_for_state(sleeper.pid, "T")
    took_s, text, _ = stuck_after(sleeper.pid)
    assert took_s == pytest.approx(MOST_FACTOR * IDLE_S) and text == "no answer in 60 s; its process is in state T"
    took_s, text, _ = stuck_after(2**30)
    assert took_s == pytest.approx(MOST_FACTOR * IDLE_S) and text == "no answer in 60 s"


def test_an_answer_in_time_is_no_error_and_ends_the_watch() -> None:
    async def main(env: SimEnv) -> float:
        async with HelperWatch(os.getpid(), IDLE_S) as watch:
            await asyncio.sleep(3.0)
        assert not watch.stood_still
        await asyncio.sleep(1_000.0)
        return env.now()

    run(main, seed=1)


def test_the_activity_of_a_process_is_its_state_and_cpu_time() -> None:
    before = activity_of(os.getpid())
    end_s = time.process_time() + 0.05
    while time.process_time() < end_s:
        pass
    after = activity_of(os.getpid())
    assert before is not None and after is not None
    assert after.state == "R" and after.cpu_ticks >= before.cpu_ticks + 4
    assert activity_of(2**30) is None
