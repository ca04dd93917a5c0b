"""The threads for bodies and prompts: who waits for whom."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest

from millrace.deploy.http.sized_threads import LONG_BYTES, SizedThreads, run_sized

WAIT_S = 20.0


@pytest.fixture
def threads():
    made = SizedThreads("test")
    yield made
    made.shutdown(cancel_futures=True)


def test_a_short_job_does_not_wait_for_long_ones(threads: SizedThreads):
    go = threading.Event()
    long = [threads.submit_sized(LONG_BYTES, go.wait, WAIT_S) for _ in range(24)]
    assert threads.submit_sized(10, str, 1).result(WAIT_S) == "1"
    assert threads.submit(str, 2).result(WAIT_S) == "2"
    assert not any(job.done() for job in long)
    go.set()
    assert all(job.result(WAIT_S) for job in long)


def test_of_long_jobs_the_shorter_ones_pass_those_that_came_shortly_before(threads: SizedThreads):
    begun, go, order = threading.Event(), threading.Event(), list[int]()

    def hold() -> None:
        begun.set()
        go.wait(WAIT_S)

    first: Future[None] = threads.submit_sized(LONG_BYTES, hold)
    assert begun.wait(WAIT_S)
    sizes = [4 << 20, 4 << 20, 300 << 10, 1 << 20]
    jobs = [threads.submit_sized(size, order.append, size) for size in sizes]
    go.set()
    first.result(WAIT_S)
    for job in jobs:
        job.result(WAIT_S)
    assert order == sorted(sizes)


def test_results_errors_and_the_end_reach_the_waiting_task(threads: SizedThreads):
    async def main() -> None:
        assert await run_sized(threads, 1 << 20, divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await run_sized(threads, 1 << 20, divmod, 7, 0)

    asyncio.run(main())
    begun, go = threading.Event(), threading.Event()
    first = threads.submit_sized(1 << 20, lambda: (begun.set(), go.wait(WAIT_S)))
    assert begun.wait(WAIT_S)
    waiting = threads.submit_sized(1 << 20, str)
    threads.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled()
    go.set()
    first.result(WAIT_S)
    with pytest.raises(RuntimeError):
        threads.submit_sized(1 << 20, str)
    assert not threads._waiting
