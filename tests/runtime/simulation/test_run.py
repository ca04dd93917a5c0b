"""The simulated loop: virtual time, seeded order, and errors that a live loop would hide."""

import asyncio
import gc
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest

from millrace.runtime.simulation.run import POLICIES, Deadlock, Livelock, LoopErrors, SimEnv, SimError, run
from millrace.runtime.simulation.testing import LeakedTasks, no_leaked_tasks, sim_test
from millrace.runtime.workers.worker import WorkerClosed

Main = Callable[[SimEnv], Coroutine[Any, Any, Any]]


async def busy(env: SimEnv) -> list[str]:
    """A bit of everything: tasks, sets of tasks, timers, cancellation, a worker, streams, faults."""
    log: list[str] = []
    worker = env.worker("device")

    async def client(name: str) -> None:
        for i in range(5):
            await env.sleep(env.random(name).uniform(0, 0.01))
            log.append(await worker.submit(str, f"{name}{i}"))
            if env.fault("client.leaves"):
                raise asyncio.CancelledError
        await env.sleep(3_600)

    async with anyio.create_task_group() as group:
        for name in "abcdef":
            group.start_soon(client, name, name=f"client-{name}")
        await env.sleep(0.1)
        group.cancel_scope.cancel()
    tasks = {asyncio.create_task(env.sleep(0.001), name=f"set-{i}") for i in range(20)}
    for task in await env.run_in_thread(list, tasks):
        task.cancel()
    await asyncio.wait(tasks)
    await env.aclose()
    return log


def busy_hashes() -> list[str]:
    return [
        run(busy, seed=seed, policy=policy, fault_probability=0.2).trace_hash
        for seed in range(4)
        for policy in (*POLICIES, "starve:client-b")
    ]


def test_an_hour_of_virtual_time_takes_none_and_timers_fire_in_order():
    async def main(env: SimEnv) -> list[tuple[str, float]]:
        start, fired = env.now(), []
        loop = asyncio.get_running_loop()
        for name, delay_s in (("late", 3_600.0), ("soon", 0.5), ("middle", 60.0)):
            loop.call_later(delay_s, lambda name=name: fired.append((name, env.now() - start)))
        cancelled = loop.call_later(1.0, fired.append, ("never", 0.0))
        cancelled.cancel()
        await env.sleep(3_600.5)
        return fired

    result = run(main, seed=1)
    assert result.value == [("soon", 0.5), ("middle", 60.0), ("late", 3_600.0)]
    assert result.virtual_s == 3_600.5


def test_many_cancelled_timers_are_cleared_away():
    async def main(env: SimEnv) -> int:
        timers = [env.loop.call_later(1_000 + i, int) for i in range(1_000)]
        for timer in timers:
            timer.cancel()
        await env.sleep(1)
        await env.sleep(1)
        return len(env.loop._scheduled)

    assert run(main, seed=1).value == 0


def test_the_same_seed_gives_the_same_trace_and_another_seed_another():
    assert busy_hashes() == busy_hashes()
    assert len(set(busy_hashes())) == len(busy_hashes())


@pytest.mark.slow
def test_the_same_seed_gives_the_same_trace_in_processes_of_other_hash_seeds():
    hashes = [
        subprocess.run(
            [sys.executable, __file__],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "31337")
    ]
    assert hashes[0] == hashes[1] == "\n".join([*busy_hashes(), ""])


def test_seeds_explore_every_order_of_three_ready_tasks_save_under_fifo():
    async def main(env: SimEnv) -> str:
        order: list[str] = []

        async def append(name: str) -> None:
            order.append(name)

        await asyncio.gather(*(append(name) for name in "abc"))
        return "".join(order)

    for policy, expected in (("uniform", 6), ("pct", 6), ("fifo", 1)):
        assert len({run(main, seed=seed, policy=policy).value for seed in range(40)}) == expected


def test_uniform_choice_is_uniform():
    async def main(env: SimEnv) -> str:
        order: list[str] = []
        for name in "abcd":
            env.loop.call_soon(order.append, name)
        await env.sleep(0.001)
        return order[0]

    firsts = Counter(run(main, seed=seed).value for seed in range(200))
    assert set(firsts) == set("abcd") and max(firsts.values()) < 75  # 50 expected, standard deviation 6


def test_a_starved_task_runs_only_when_nothing_else_is_ready():
    async def main(env: SimEnv) -> list[str]:
        order: list[str] = []

        async def steps(name: str) -> None:
            for _ in range(3):
                order.append(name)
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            for name in ("stage-slow", "stage-a", "stage-b"):
                group.create_task(steps(name), name=name)
        return order

    for seed in range(10):
        assert run(main, seed=seed, policy="starve:*-slow").value[-3:] == ["stage-slow"] * 3


def test_under_pct_one_task_runs_on_while_it_is_ready_but_not_for_ever():
    async def main(env: SimEnv) -> int:
        counts = Counter[str]()
        switches, last = 0, ""

        async def spin(name: str) -> None:
            nonlocal switches, last
            while len(counts) < 3:
                counts[name] += 1
                switches, last = switches + (last != name), name
                await asyncio.sleep(0)

        await asyncio.gather(*(spin(name) for name in "abc"))
        assert sum(counts.values()) > 3 * switches
        return switches

    for seed in range(10):
        assert run(main, seed=seed, policy="pct").value >= 3


def test_a_deadlock_is_reported_at_once_with_where_each_task_waits():
    async def main(env: SimEnv) -> None:
        never = asyncio.Event()

        async def wait_for_credit() -> None:
            await never.wait()

        async def schedule() -> None:
            await wait_for_credit()

        await asyncio.create_task(schedule(), name="schedule")

    with pytest.raises(Deadlock) as caught:
        run(main, seed=3)
    text = str(caught.value)
    assert "main waits at" in text and "schedule waits at" in text
    assert re.search(r"schedule waits at \S+locks.py:\d+ in Event.wait < \S+test_run.py:\d+ in \S+credit", text)
    assert "seed=3 policy='uniform'" in caught.value.__notes__[0]


def test_code_that_polls_is_a_livelock():
    async def main(env: SimEnv) -> None:
        async def poll() -> None:
            while True:  # noqa: ASYNC110
                await asyncio.sleep(0)

        await asyncio.create_task(poll(), name="poller")

    with pytest.raises(Livelock, match=r"= 10000\); virtual time is 0.000000 s; busiest of late: 2 poller"):
        run(main, seed=1, max_callbacks=10_000)


def test_an_error_that_is_never_retrieved_fails_the_run():
    async def forgotten_task(env: SimEnv) -> None:
        async def fail() -> None:
            raise ValueError("lost")

        task = asyncio.create_task(fail(), name="forgotten")
        await env.sleep(1)
        assert task.done()

    async def forgotten_in_a_cycle(env: SimEnv) -> None:
        future = env.loop.create_future()
        future.set_exception(ValueError("lost"))
        cycle = [future]
        cycle.append(cycle)  # type: ignore[arg-type]

    async def failing_callback(env: SimEnv) -> None:
        env.loop.call_soon(int, "lost")
        await env.sleep(1)

    for main in (forgotten_task, forgotten_in_a_cycle, failing_callback):
        with pytest.raises(LoopErrors, match="lost") as caught:
            run(main, seed=1)
        assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_of_the_main_coroutine_leaves_as_it_is_and_its_tasks_are_unwound():
    unwound: list[str] = []

    async def main(env: SimEnv) -> None:
        async def child() -> None:
            try:
                await env.sleep(10)
            finally:
                unwound.append("child")

        task = asyncio.create_task(child())
        await env.sleep(1)
        assert not task.done()
        raise LookupError("main")

    with pytest.raises(LookupError, match="main") as caught:
        run(main, seed=9, policy="pct")
    assert unwound == ["child"] and "seed=9 policy='pct'" in caught.value.__notes__[0]


def test_tasks_that_outlive_main_are_reported_with_their_place_and_cancelled():
    async def main(env: SimEnv) -> None:
        leaker = asyncio.create_task(env.sleep(99), name="leaker")
        await env.sleep(1)
        assert not leaker.done()

    (place,) = run(main, seed=1).leaked_tasks
    assert place.startswith("leaker waits at ") and "env.py" in place


def test_a_task_that_ignores_cancellation_fails_the_run_in_place_of_hanging_it():
    async def main(env: SimEnv) -> None:
        async def stubborn() -> None:
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    env.note("ignored")

        task = asyncio.create_task(stubborn(), name="stubborn")
        await env.sleep(1)
        assert not task.done()

    with pytest.raises(Deadlock, match="stubborn waits at"):
        run(main, seed=1)


def test_jobs_take_virtual_time_begin_in_order_and_overlap_only_over_several_threads():
    async def main(env: SimEnv, threads: int) -> tuple[float, list[int]]:
        worker = env.worker("w", threads)
        ran: list[int] = []
        start = env.now()
        jobs = [worker.submit(ran.append, i) for i in range(4)]
        await asyncio.sleep(0)
        await asyncio.gather(*jobs)
        await env.aclose()
        return env.now() - start, ran

    for seed in range(10):
        elapsed_s, ran = run(lambda env: main(env, 1), seed=seed, worker_delay_s={"w": (0.5, 0.5)}).value
        assert elapsed_s == pytest.approx(2.0) and ran == [0, 1, 2, 3]
    assert run(lambda env: main(env, 2), seed=1, worker_delay_s={"w": (0.5, 0.5)}).value[0] == pytest.approx(1.0)


def test_simulated_jobs_act_as_live_ones_on_cancelling_errors_and_closing():
    class RustPanic(BaseException):
        pass

    async def main(env: SimEnv) -> None:
        worker = env.worker("w")
        ran: list[str] = []

        def fail() -> None:
            raise RustPanic

        with pytest.raises(RustPanic):
            await worker.submit(fail)
        running, waiting, last = (worker.submit(ran.append, name) for name in ("running", "waiting", "last"))
        await env.sleep(0.25)
        assert worker.num_waiting == 2
        running.cancel()
        waiting.cancel()
        assert worker.num_waiting == 1
        await last
        assert ran == ["running", "last"]
        never = [worker.submit(ran.append, name) for name in ("begun", "not begun")]
        await env.sleep(0.25)
        closings = [asyncio.create_task(worker.aclose()) for _ in range(2)]
        await asyncio.wait([*closings, *never])
        await worker.aclose()
        assert ran == ["running", "last", "begun"] and never[1].cancelled()
        with pytest.raises(WorkerClosed):
            worker.submit(int)

    for seed in range(10):
        run(main, seed=seed, thread_delay_s=(0.5, 0.5))


def test_fault_points_strike_with_their_probability_and_are_counted():
    async def main(env: SimEnv) -> int:
        return sum(env.fault("named", 0.25) for _ in range(1_000)) + 1_000_000 * env.fault("other", 1.0)

    result = run(main, seed=5, fault_names=["named"])
    assert 190 < result.value < 310  # 250 expected, standard deviation 14; "other" never
    assert result.faults_seen == {"named": 1_000, "other": 1} and result.faults_fired == {"named": result.value}
    assert run(main, seed=5).value == 0
    assert run(main, seed=5, fault_names={"other": 1.0}).value >= 1_000_000


def test_each_fault_point_is_on_in_half_of_the_runs_and_draws_its_own_probability():
    async def main(env: SimEnv) -> int:
        return sum(env.fault("x") for _ in range(200))

    fired = [run(main, seed=seed, fault_probability=0.5).value for seed in range(60)]
    assert 15 <= fired.count(0) <= 45 and len(set(fired)) > 10 and max(fired) < 130


def test_a_fault_point_does_not_shift_the_draws_of_another():
    async def main(env: SimEnv, passes: int) -> list[bool]:
        for _ in range(passes):
            env.fault("added later")
        return [env.fault("x", 0.5) for _ in range(50)]

    few = run(lambda env: main(env, 0), seed=2, fault_names=["x"]).value
    assert few == run(lambda env: main(env, 10), seed=2, fault_names=["x", "added later"]).value


def test_the_wall_clock_may_jump_and_the_monotonic_one_does_not():
    async def main(env: SimEnv) -> tuple[float, float]:
        wall, now = env.wall_time(), env.now()
        await env.sleep(1)
        return env.wall_time() - wall, env.now() - now

    assert run(main, seed=1).value == (1.0, 1.0)
    jumps = [run(main, seed=seed, fault_names={"env.wall_clock_jump": 1.0}).value for seed in range(5)]
    assert all(abs(wall) > 2 and now == 1.0 for wall, now in jumps)


def test_notes_are_part_of_the_trace():
    def noting(field: str) -> Main:
        async def main(env: SimEnv) -> None:
            env.note("sequence", 7, field)

        return main

    one, other = (run(noting(field), seed=1, keep_trace=True) for field in ("a", "b"))
    assert "('sequence', 7, 'a')" in one.trace and one.trace_hash != other.trace_hash


def test_real_threads_are_refused():
    async def main(env: SimEnv) -> None:
        with pytest.raises(SimError, match="env.run_in_thread"):
            await asyncio.to_thread(int)
        errors: list[BaseException] = []

        def call() -> None:
            try:
                env.loop.call_soon_threadsafe(int)
            except SimError as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert "real thread" in str(errors[0])

    run(main, seed=1)


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ValueError, match="policy 'lifo' is unknown: use one of uniform, pct, fifo or starve:"):
        SimEnv(1, policy="lifo")


def test_the_garbage_collector_is_as_before_after_a_run():
    async def main(env: SimEnv) -> bool:
        return gc.isenabled()

    assert gc.isenabled()
    assert run(main, seed=1).value is False
    assert gc.isenabled()


def test_sim_test_runs_each_seed_and_says_how_to_repeat_the_one_that_failed(monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[int, str]] = []

    @sim_test(seeds=6, policies=("uniform", "pct"))
    async def test(env: SimEnv, fixture: str) -> None:
        seen.append((env.seed, fixture))
        assert env.seed != 3

    with pytest.raises(AssertionError) as caught:
        test(fixture="f")
    assert seen == [(0, "f"), (1, "f"), (2, "f"), (3, "f")]
    assert "again: MILLRACE_SIM_SEED=3 MILLRACE_SIM_POLICY=pct pytest ..." in caught.value.__notes__
    monkeypatch.setenv("MILLRACE_SIM_SEED", "5")
    test(fixture="g")
    assert seen[4:] == [(5, "g")]


def test_sim_test_fails_on_a_leaked_task():
    @sim_test(seeds=1)
    async def test(env: SimEnv) -> None:
        env.loop.create_task(env.sleep(9), name="leaker")

    with pytest.raises(LeakedTasks, match="1 tasks outlived the test:\nleaker waits at"):
        test()


def test_no_leaked_tasks_names_what_the_block_left_on_a_live_loop():
    async def main() -> None:
        with no_leaked_tasks():
            await asyncio.create_task(asyncio.sleep(0))
        with pytest.raises(LeakedTasks, match="name='leaker'"), no_leaked_tasks():
            asyncio.get_running_loop().create_task(asyncio.sleep(9), name="leaker")

    asyncio.run(main())


@sim_test(seeds=5)
async def test_timeouts_and_anyio_cancel_scopes_work_in_virtual_time(env: SimEnv) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(30):
            await env.sleep(60)
    with anyio.move_on_after(30) as scope:
        await anyio.sleep(60)
    assert scope.cancelled_caught


if __name__ == "__main__":
    print("\n".join(busy_hashes()))
