"""When a job's result is delivered to the loop: how often the loop wakes, and that no waiter is missed."""

import asyncio
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from millrace.runtime.env.env import LiveEnv
from millrace.runtime.workers.step_queue import StepQueue
from millrace.runtime.workers.worker import AskedTooLate, Told, Worker


class CountedLoop(asyncio.SelectorEventLoop):
    """Counts how often threads wake it."""

    num_woken = 0

    def call_soon_threadsafe(self, *args: Any, **named: Any) -> asyncio.Handle:
        self.num_woken += 1
        return super().call_soon_threadsafe(*args, **named)

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        def call() -> None:
            self.num_woken += 1
            callback(*args)

        super().add_reader(fd, call)


def run(main: Callable[[CountedLoop, Worker], Any]) -> None:
    async def with_worker(loop: CountedLoop) -> None:
        env = LiveEnv()
        await main(loop, env.worker("device"))
        await env.aclose()

    loop = CountedLoop()
    try:
        loop.run_until_complete(asyncio.wait_for(with_worker(loop), 30))
    finally:
        loop.close()


def test_a_job_told_if_asked_wakes_no_loop_and_comes_before_the_next_that_is_told():
    async def main(loop: CountedLoop, worker: Worker) -> None:
        order: list[str] = []
        quiet = worker.submit(lambda: "logits", told=Told.IF_ASKED)
        tokens = worker.submit(lambda: "tokens")
        tokens.add_done_callback(lambda _: order.append("logits" if quiet.done() else "nothing"))
        assert await tokens == "tokens"
        assert order == ["logits"]
        assert quiet.result() == "logits"
        assert loop.num_woken == 1

    run(main)


@pytest.mark.parametrize("is_over", [False, True])
def test_who_waits_for_a_job_told_if_asked_gets_it_whether_it_is_over_or_not(is_over: bool):
    async def main(loop: CountedLoop, worker: Worker) -> None:
        may_end = threading.Event()
        quiet = worker.submit(lambda: may_end.wait(20), told=Told.IF_ASKED)
        if is_over:
            may_end.set()
            over = threading.Event()
            worker.submit(over.set, told=Told.IF_ASKED)
            await asyncio.to_thread(over.wait)  # of another thread: that delivered nothing of this worker
        else:
            loop.call_soon(may_end.set)
        assert await quiet is True

    run(main)


def test_an_error_that_is_not_awaited_is_not_logged_and_a_waiter_gets_it():
    async def main(loop: CountedLoop, worker: Worker) -> None:
        complaints: list[Any] = []
        loop.set_exception_handler(lambda _, context: complaints.append(context))

        def fail() -> None:
            raise MemoryError("forward 0")

        ignored, asked = (worker.submit(fail, told=Told.IF_ASKED) for _ in range(2))
        with pytest.raises(MemoryError, match="forward 0"):
            await asked
        del ignored, asked
        await asyncio.sleep(0)
        assert complaints == []

    run(main)


class Logits:
    """A phase's result; a weak reference shows whether it is still held."""


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_a_result_not_awaited_when_the_step_goes_on_is_freed_before_the_next_step(is_asked_for: bool):
    async def main(loop: CountedLoop, worker: Worker) -> None:
        steps = StepQueue(worker, num_phases=2)
        may_end = threading.Event()
        made: list[weakref.ref[Logits]] = []

        def forward() -> Logits:
            may_end.wait(20)
            logits = Logits()
            made.append(weakref.ref(logits))
            return logits

        promise = steps.submit(0, 0, forward, Told.IF_ASKED)
        asking = asyncio.ensure_future(_of(promise)) if is_asked_for else None
        await asyncio.sleep(0)
        steps.submit(0, 1, lambda: None, Told.BEFORE_WAITING)
        is_held = steps.submit(1, 0, lambda: made[0]() is not None)
        may_end.set()
        if asking is not None:
            logits = await asking
            assert logits is made[0]()
            return
        assert await is_held is False
        with pytest.raises(AskedTooLate):
            await promise

    run(main)


def test_who_asks_too_late_for_a_job_that_failed_hears_why_it_failed():
    async def main(loop: CountedLoop, worker: Worker) -> None:
        may_end = threading.Event()

        def fail() -> None:
            may_end.wait(20)
            raise ValueError("the device fell")

        promise = worker.submit(fail, told=Told.IF_ASKED)
        worker.forget(promise)
        may_end.set()
        await worker.submit(lambda: None)
        with pytest.raises(ValueError, match="the device fell"):
            await promise

    run(main)


async def _of(future: asyncio.Future[Any]) -> Any:
    return await future


@pytest.mark.parametrize("by", ["word", "end", "nothing to do"])
def test_a_job_told_before_waiting_is_delivered_at_the_next_ones_tell_or_end(by: str):
    async def main(loop: CountedLoop, worker: Worker) -> None:
        may_begin, may_go_on, is_on, may_end = (threading.Event() for _ in range(4))

        def compute() -> None:
            is_on.set()
            may_go_on.wait(20)
            if by == "word":
                worker.tell()
                may_end.wait(20)

        worker.submit(may_begin.wait, told=Told.IF_ASKED)
        tokens = worker.submit(lambda: "tokens", told=Told.BEFORE_WAITING)
        following = worker.submit(compute, told=Told.IF_ASKED) if by != "nothing to do" else None
        may_begin.set()
        if following is not None:
            await asyncio.to_thread(is_on.wait)
            assert not tokens.done(), "the thread is getting ready: it must not have been disturbed"
            may_go_on.set()
        assert await tokens == "tokens"
        may_end.set()

    run(main)


def test_a_job_told_before_waiting_is_not_forgotten_when_the_next_one_is_cancelled():
    async def main(loop: CountedLoop, worker: Worker) -> None:
        may_begin = threading.Event()
        first = worker.submit(may_begin.wait)
        tokens = worker.submit(lambda: "tokens", told=Told.BEFORE_WAITING)
        following = worker.submit(lambda: None, told=Told.IF_ASKED)
        following.cancel()
        may_begin.set()
        await first
        assert await tokens == "tokens"

    run(main)


def test_an_env_that_closes_also_closes_workers_made_meanwhile_and_serves_later_ones():
    async def main(loop: CountedLoop, worker: Worker) -> None:
        def hold(which: int) -> bool:
            begun[which].set()
            return may_end[which].wait(30)

        begun, may_end = ([threading.Event(), threading.Event()] for _ in range(2))
        env = LiveEnv()
        jobs = [env.worker("first").submit(hold, 0)]
        await asyncio.to_thread(begun[0].wait, 30)
        closing = asyncio.create_task(env.aclose())
        await asyncio.sleep(0)  # it waits for the first
        jobs.append(env.worker("second").submit(hold, 1))
        await asyncio.to_thread(begun[1].wait, 30)
        may_end[0].set()
        loop.call_later(0.05, may_end[1].set)
        await closing
        assert await asyncio.wait_for(asyncio.gather(*jobs), 10) == [True, True]
        assert await asyncio.wait_for(env.worker("third").submit(lambda: 3), 10) == 3
        await env.aclose()

    run(main)
