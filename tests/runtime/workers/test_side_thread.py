"""A thread that does jobs for callers without an event loop."""

from __future__ import annotations

import threading
import weakref

import pytest

from millrace.runtime.env.env import LiveEnv
from millrace.runtime.workers.side_thread import LiveSideThread, SideThreadClosed


def test_jobs_are_done_in_order_on_one_thread_from_any_submitter() -> None:
    side, done = LiveSideThread("order"), []

    def job(number: int) -> str:
        done.append(number)
        return threading.current_thread().name

    pending = [side.submit(job, number) for number in range(100)]
    assert {one.result() for one in pending} == {"millrace-order"} and done == list(range(100))
    assert pending[3].result() == "millrace-order", "a result may be asked for again"
    side.close()


def test_a_result_raises_what_the_job_raised_and_the_thread_lives_on() -> None:
    side = LiveSideThread("errors")

    def fail() -> None:
        raise SystemExit("a panic is a BaseException too")

    failed, next_one = side.submit(fail), side.submit(lambda: 7)
    assert next_one.result() == 7
    for _ in range(2):
        with pytest.raises(SystemExit, match="a panic"):
            failed.result()
    side.close()


def test_closing_waits_for_the_job_that_has_begun_and_drops_the_others() -> None:
    side, has_begun, may_end = LiveSideThread("closed"), threading.Event(), threading.Event()

    def long() -> str:
        has_begun.set()
        assert may_end.wait(60)
        return "done"

    begun, dropped = side.submit(long), side.submit(lambda: "never")
    assert has_begun.wait(60)
    closer = threading.Thread(target=side.close)
    closer.start()
    while not side.is_closed:
        pass
    may_end.set()
    closer.join(60)
    assert not closer.is_alive() and begun.result() == "done"
    with pytest.raises(SideThreadClosed, match="was not run"):
        dropped.result()
    with pytest.raises(SideThreadClosed, match="'closed' is closed: .* too late"):
        side.submit(long)
    side.close()


def test_a_thread_that_was_never_used_was_never_started() -> None:
    side = LiveSideThread("unused")
    assert not side.is_used
    side.close()
    assert not side.is_used


def test_an_idle_thread_keeps_nothing_of_its_last_job_alive() -> None:
    class Argument:
        pass

    side, argument = LiveSideThread("idle"), Argument()
    is_gone = threading.Event()
    weakref.finalize(argument, is_gone.set)
    pending = side.submit(id, argument)
    pending.result()
    del argument
    assert is_gone.wait(60)
    side.close()


@pytest.mark.anyio
async def test_an_env_closes_its_side_threads() -> None:
    env = LiveEnv()
    side = env.side_thread("of-env")
    assert side.submit(lambda: threading.current_thread().name).result() == "millrace-of-env"
    await env.aclose()
    with pytest.raises(SideThreadClosed):
        side.submit(int)
