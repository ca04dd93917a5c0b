"""What the live env promises: ordered workers, cancellation, errors, a clean end."""

import asyncio
import contextvars
import gc
import os
import threading
import weakref

import pytest

from millrace.runtime.env import cpus
from millrace.runtime.env.env import LiveEnv
from millrace.runtime.env.loops import until_any_is_set
from millrace.runtime.simulation.manual_env import ManualEnv
from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.workers.worker import WorkerClosed


class RustPanic(BaseException):
    pass


def threads_of(worker_name: str) -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith(f"millrace-{worker_name}"))


def test_jobs_of_a_worker_run_in_the_order_of_submission_on_its_own_thread():
    async def main() -> None:
        env = LiveEnv()
        worker = env.worker("device")
        ran: list[tuple[int, str]] = []
        results = [worker.submit(lambda i=i: ran.append((i, threading.current_thread().name)) or i) for i in range(50)]
        assert await asyncio.gather(*results) == list(range(50))
        assert ran == [(i, "millrace-device") for i in range(50)]
        await env.aclose()

    asyncio.run(main())


def test_a_base_exception_in_a_job_reaches_the_awaiter_and_the_thread_lives_on():
    async def main() -> None:
        env = LiveEnv()
        worker = env.worker("tokenizer")
        for kind in (ValueError, RustPanic, SystemExit, KeyboardInterrupt):

            def fail(kind: type[BaseException] = kind) -> None:
                raise kind("as raised")

            job = worker.submit(fail)
            await asyncio.wait([job])
            assert type(job.exception()) is kind
        assert await worker.submit(lambda: "alive") == "alive"
        await env.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("kind", [StopIteration, asyncio.CancelledError])
def test_a_job_cannot_end_its_awaiter_by_raising_what_a_future_reads_as_control_flow(kind: type[BaseException]):
    async def main() -> None:
        env = LiveEnv()

        def fail() -> None:
            raise kind

        with pytest.raises(RuntimeError, match=f"fail raised {kind.__name__}"):
            await env.worker("w").submit(fail)
        await env.aclose()

    asyncio.run(main())


def test_cancelling_removes_a_waiting_job_and_drops_the_result_of_a_running_one():
    async def main() -> None:
        env = LiveEnv()
        worker = env.worker("w")
        begun, go_on, ran = threading.Event(), threading.Event(), []

        def first() -> None:
            begun.set()
            go_on.wait(60)
            ran.append("first")

        running = worker.submit(first)
        waiting = worker.submit(ran.append, "second")
        last = worker.submit(ran.append, "third")
        begun.wait(60)
        assert worker.num_waiting == 2
        waiting.cancel()
        running.cancel()
        assert worker.num_waiting == 1
        go_on.set()
        await last
        assert ran == ["first", "third"] and running.cancelled() and waiting.cancelled()
        await env.aclose()

    asyncio.run(main())


def test_a_cancelled_waiting_job_lets_go_of_its_arguments_at_once():
    class Tensor:
        pass

    async def main() -> None:
        env = LiveEnv()
        worker = env.worker("w")
        go_on = threading.Event()
        blocker = worker.submit(go_on.wait, 60)
        tensor = Tensor()
        gone = weakref.ref(tensor)
        job = worker.submit(id, tensor)
        del tensor
        job.cancel()
        assert gone() is None
        go_on.set()
        await blocker
        await env.aclose()

    asyncio.run(main())


def test_an_idle_worker_keeps_nothing_of_its_last_job_alive():
    class Tensor:
        pass

    async def main() -> None:
        env = LiveEnv()
        worker = env.worker("w")
        result = await worker.submit(Tensor)
        gone = weakref.ref(result)
        del result
        await worker.submit(int)
        gc.collect()
        assert gone() is None
        await env.aclose()

    asyncio.run(main())


def test_closing_waits_for_the_running_job_cancels_the_others_and_joins_the_threads():
    async def main() -> None:
        env = LiveEnv()
        worker = env.worker("w", threads=2)
        begun, go_on = threading.Barrier(3), threading.Event()
        running = [worker.submit(lambda: begun.wait(60) >= 0 and go_on.wait(60)) for _ in range(2)]
        waiting = [worker.submit(int) for _ in range(3)]
        await asyncio.sleep(0)  # a turn of the loop, at which a free thread is woken for jobs
        begun.wait(60)
        assert threads_of("w") == ["millrace-w-0", "millrace-w-1"]
        closings = [asyncio.create_task(worker.aclose()) for _ in range(2)]
        await asyncio.sleep(0)
        assert all(job.cancelled() for job in waiting) and not any(c.done() for c in closings)
        go_on.set()
        await asyncio.gather(*closings, worker.aclose())
        assert [job.result() for job in running] == [True, True]
        assert threads_of("w") == []
        with pytest.raises(WorkerClosed, match="worker 'w' is closed: int"):
            worker.submit(int)

    asyncio.run(main())


def test_run_in_thread_sees_the_callers_contextvars_and_returns_its_result():
    request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id")

    async def main() -> None:
        env = LiveEnv()
        request_id.set("r1")
        assert await env.run_in_thread(request_id.get) == "r1"
        assert await env.run_in_thread(divmod, 7, 2) == (3, 1)
        await env.aclose()
        assert threads_of("pool") == []

    asyncio.run(main())


def test_a_loop_that_closes_over_a_running_job_is_no_error_in_the_thread():
    go_on = threading.Event()
    errors: list[object] = []
    worker = LiveEnv().worker("orphan")

    async def main() -> None:
        worker.submit(go_on.wait, 60)

    hook, threading.excepthook = threading.excepthook, errors.append
    try:
        asyncio.run(main())
        (thread,) = (t for t in threading.enumerate() if t.name == "millrace-orphan")
        go_on.set()
        thread.join(0.05)
    finally:
        threading.excepthook = hook
    assert thread.is_alive() and thread.daemon and errors == []  # it waits for jobs; the process may end without it
    worker._jobs.append(None)  # type: ignore[attr-defined]  # `aclose` cannot end it: it needs the loop
    worker._call()  # type: ignore[attr-defined]
    thread.join(60)


def test_jobs_that_come_while_threads_go_to_sleep_are_all_done():
    async def main() -> None:
        env = LiveEnv()
        worker = env.worker("w", threads=2)
        for num_jobs in (1, 2, 3, 7) * 200:
            jobs = [worker.submit(int, "5") for _ in range(num_jobs)]
            if num_jobs == 3:
                await asyncio.sleep(0)
                jobs.append(worker.submit(int, "5"))
            assert await asyncio.wait_for(asyncio.gather(*jobs), 60) == [5] * len(jobs)
        await env.aclose()

    asyncio.run(main())


def test_an_env_used_on_a_second_loop_says_so():
    env = LiveEnv()
    worker = env.worker("w")

    async def use() -> int:
        return await worker.submit(int)

    with asyncio.Runner() as owner:
        owner.run(use())
        with asyncio.Runner() as other, pytest.raises(RuntimeError, match="one LiveEnv per loop"):
            other.run(use())
        owner.run(env.aclose())


def test_random_streams_depend_on_seed_and_name_only():
    one, same, other = LiveEnv(seed=1), LiveEnv(seed=1), LiveEnv(seed=2)
    same.random("elsewhere").random()
    assert [one.random("a").random() for _ in range(3)] == [same.random("a").random() for _ in range(3)]
    assert one.random("a") is one.random("a")
    assert one.random("b").random() != other.random("b").random() != one.random("c").random()
    assert one.random("known").getrandbits(32) == 3868693624  # in every process, or recorded seeds become useless
    assert LiveEnv().random("a").random() != LiveEnv().random("a").random()


def test_live_fault_points_never_strike_and_clocks_agree_with_the_loop():
    async def main() -> None:
        env = LiveEnv()
        assert not any(env.fault("x", 1.0) for _ in range(100))
        assert abs(env.now() - asyncio.get_running_loop().time()) < 1.0
        assert abs(env.now_ns() / 1e9 - env.now()) < 1.0
        assert env.wall_time() > 1.6e9

    asyncio.run(main())


@pytest.mark.parametrize("kind", [LiveEnv, SimEnv])
def test_an_env_calls_at_the_time_that_it_was_told_unless_that_is_cancelled(kind: type[LiveEnv] | type[SimEnv]):
    env = kind(0)

    async def main() -> None:
        called: list[float] = []
        env.call_at(when_s := env.now() + 0.02, lambda: called.append(env.now()))
        alarm = env.call_at(env.now() + 0.01, lambda: called.append(0.0))
        alarm.cancel()
        await env.sleep(0.05)
        assert len(called) == 1 and called[0] >= when_s - 1e-6
        alarm.cancel()
        await env.aclose()

    if isinstance(env, SimEnv):
        env.loop.run_until_complete(main())
    else:
        asyncio.run(main())


def test_where_time_is_set_from_outside_those_are_called_whose_time_has_come():
    env, called = ManualEnv(), []
    alarms = {when_s: env.call_at(when_s, lambda when_s=when_s: called.append(when_s)) for when_s in (3.0, 1.0, 2.0)}
    assert env.next_alarm_s == 1.0
    alarms[1.0].cancel()
    env.time_s = 2.5
    env.ring()
    assert called == [2.0] and env.next_alarm_s == 3.0
    alarms[2.0].cancel()
    env.time_s = 3.0
    env.ring()
    env.ring()
    assert called == [2.0, 3.0] and env.next_alarm_s == float("inf")


def test_of_alarms_due_together_the_earlier_is_called_first_and_may_cancel_the_later():
    env, called = ManualEnv(), []
    later = env.call_at(2.0, lambda: called.append(2.0))
    env.call_at(1.0, later.cancel)
    env.call_at(0.5, lambda: called.append(0.5))
    env.time_s = 3.0
    env.ring()
    assert called == [0.5] and env.next_alarm_s == float("inf")


def test_a_secret_is_known_to_no_one_who_knows_the_seed():
    assert LiveEnv(0).secret("keys", 16) != LiveEnv(0).secret("keys", 16)
    assert SimEnv(0).secret("keys", 16) == SimEnv(0).secret("keys", 16)


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="threads have one CPU"
)
def test_other_workers_and_threads_that_yield_leave_the_first_worker_its_own_cpu(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(cpus, "_narrowed", {})
    here = os.sched_getaffinity(0)
    own = min(here)

    async def main() -> tuple[set[int], ...]:
        env = LiveEnv()
        device, begun = env.worker("device"), env.worker("tokenizer")
        for worker in (device, begun):
            await worker.submit(int)
        env.yield_to("device", own)
        env.yield_this_thread()
        late = env.worker("late")
        found = [await worker.submit(os.sched_getaffinity, 0) for worker in (device, begun, late)]
        await env.aclose()
        return *found, os.sched_getaffinity(0)

    found: list[set[int]] = []
    loop = threading.Thread(target=lambda: found.extend(asyncio.run(main())))  # not this one: it cannot be undone
    loop.start()
    loop.join()
    assert found == [here, *[here - {own}] * 3]


def test_a_wait_for_several_events_ends_with_the_first_of_them_and_leaves_no_task():
    async def main() -> None:
        events = [asyncio.Event() for _ in range(3)]
        waiting = asyncio.ensure_future(until_any_is_set(*events))
        await asyncio.sleep(0)
        assert not waiting.done()
        events[1].set()
        await waiting
        waiting = asyncio.ensure_future(until_any_is_set(events[0], events[2]))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
