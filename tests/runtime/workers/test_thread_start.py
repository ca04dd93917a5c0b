"""A system that allows no further thread, for a while: what is told, and that nothing waits for what never ran."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest

from millrace.runtime.env.env import LiveEnv
from millrace.runtime.simulation.run import SimEnv, run
from millrace.runtime.workers.side_thread import LiveSideThread
from millrace.runtime.workers.step_queue import StepQueue
from millrace.runtime.workers.thread_start import ThreadNotStarted, ThreadPool, is_thread_shortage


class Shortage:
    """Allows `num_allowed` more threads; None: any number."""

    def __init__(self) -> None:
        self.num_allowed: int | None = None
        self._start = threading.Thread.start

    def start(self, thread: threading.Thread) -> None:
        if self.num_allowed == 0:
            raise RuntimeError("can't start new thread")
        self._start(thread)
        if self.num_allowed is not None:
            self.num_allowed -= 1


@pytest.fixture
def shortage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shortage]:
    made = Shortage()
    monkeypatch.setattr(threading.Thread, "start", lambda thread: made.start(thread))
    yield made
    made.num_allowed = None


def live(test: Callable[[LiveEnv], Awaitable[None]]) -> None:
    async def main() -> None:
        env = LiveEnv()
        await test(env)
        await env.aclose()

    asyncio.run(asyncio.wait_for(main(), 10.0))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_job_without_a_thread_is_refused_and_the_next_one_tries_again(shortage: Shortage, num_threads: int) -> None:
    async def test(env: LiveEnv) -> None:
        worker = env.worker("w", num_threads)
        shortage.num_allowed = 0
        for _ in range(2):
            with pytest.raises(ThreadNotStarted, match=r"thread millrace-w.* cannot be started.*ulimit -u"):
                worker.submit(int)
        with pytest.raises(ThreadNotStarted):
            worker.start()
        with pytest.raises(ThreadNotStarted):
            await env.run_in_thread(int)
        assert worker.num_waiting == 0
        shortage.num_allowed = None
        assert await worker.submit(lambda: 7) == 7 and await env.run_in_thread(lambda: 8) == 8

    live(test)


def test_closing_a_worker_waits_for_no_thread_that_never_ran(shortage: Shortage) -> None:
    async def test(env: LiveEnv) -> None:
        shortage.num_allowed = 0
        with pytest.raises(ThreadNotStarted):
            env.worker("w", 2).submit(int)

    live(test)


def test_a_pool_works_with_the_threads_that_it_got_and_gets_the_others_later(shortage: Shortage) -> None:
    async def test(env: LiveEnv) -> None:
        worker, meeting = env.worker("w", 2), threading.Barrier(2, timeout=60)
        shortage.num_allowed = 1
        assert await asyncio.gather(*(worker.submit(lambda i=i: i) for i in range(4))) == [0, 1, 2, 3]
        shortage.num_allowed = None
        await asyncio.gather(*(worker.submit(meeting.wait) for _ in range(2)))

    live(test)


def test_side_threads_are_closed_here_if_no_other_thread_can_do_it(shortage: Shortage) -> None:
    async def test(env: LiveEnv) -> None:
        assert env.side_thread("s").submit(lambda: 7).result() == 7
        shortage.num_allowed = 0

    live(test)
    assert not [thread for thread in threading.enumerate() if thread.name == "millrace-s"]


def test_a_side_thread_that_did_not_start_holds_nothing_and_starts_later(shortage: Shortage) -> None:
    side, done = LiveSideThread("s"), []
    shortage.num_allowed = 0
    with pytest.raises(ThreadNotStarted):
        side.submit(done.append, "never")
    assert not side.is_used
    assert side.submit_or_run(threading.current_thread).result() is threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        side.submit_or_run(lambda: 1 / 0).result()
    shortage.num_allowed = None
    assert side.submit_or_run(threading.current_thread).result() is not threading.current_thread()
    side.close()
    assert done == []


def test_an_executor_drops_the_job_that_it_has_no_thread_for(shortage: Shortage) -> None:
    done: list[int] = []
    with ThreadPool(2, thread_name_prefix="millrace-x") as pool:
        shortage.num_allowed = 0
        with pytest.raises(ThreadNotStarted, match="millrace-x_0"):
            pool.submit(done.append, 1)
        shortage.num_allowed = 1
        go_on = threading.Event()
        first, second = pool.submit(go_on.wait, 5), pool.submit(done.append, 2)  # the second finds no thread of its own
        go_on.set()
        assert first.result(5) and second.result(5) is None
    assert done == [2]


def test_a_phase_that_cannot_be_handed_over_fails_and_its_waiter_with_it() -> None:
    async def test(env: LiveEnv) -> None:
        worker = env.worker("device")
        queue = StepQueue(worker, num_phases=2)
        early = queue.submit(0, 1, lambda: "sampled")
        last = queue.submit(0, 0, lambda: "forward")
        assert await asyncio.gather(last, early) == ["forward", "sampled"]
        early = queue.submit(2, 0, int)
        refused = RuntimeError("no more jobs")
        submit = worker.submit
        for ticket in ((1, 0), (1, 1)):
            if ticket == (1, 1):
                worker.submit = lambda run, **_: submit(run) if run is not int else (_ for _ in ()).throw(refused)  # type: ignore[method-assign]
            await queue.submit(*ticket, lambda: None)
        with pytest.raises(RuntimeError, match="no more jobs"):
            await early

    live(test)


def test_words_of_a_library_and_our_own_error_say_the_same() -> None:
    assert is_thread_shortage(RuntimeError("can't start new thread"))
    assert is_thread_shortage(ThreadNotStarted("a", RuntimeError("x")))
    assert not is_thread_shortage(RuntimeError("x")) and not is_thread_shortage(ValueError("can't start new thread"))


def test_simulated_threads_fail_to_start_at_the_fault_point() -> None:
    async def main(env: SimEnv) -> list[str]:
        outcomes = []
        for start in (env.worker("w").submit, env.side_thread("s").submit, env.side_thread("s").submit_or_run):
            for _ in range(2):
                try:
                    start(int)
                    outcomes.append("ran")
                except ThreadNotStarted:
                    outcomes.append("refused")
        await env.aclose()
        return outcomes

    always = run(main, seed=1, fault_probability=1.0, fault_names={"thread.start": 1.0}).value
    assert always == ["refused"] * 4 + ["ran"] * 2
    assert run(main, seed=1).value == ["ran"] * 6
