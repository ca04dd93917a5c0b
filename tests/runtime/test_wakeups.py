"""Wakeups: the order in which tasks are woken, cancelled waiters, and callbacks that run between."""

from __future__ import annotations

import asyncio
from contextvars import copy_context

import pytest

from millrace.runtime.wakeups import WOKEN_AT_ONCE, SeparateWakeups, SharedWakeup, Wakeup, WakeupBatch


async def _waiting(wakeups: list[SharedWakeup], told: list[int]) -> list[asyncio.Task[None]]:
    """A task for each bell, which waits now and records its number when it is woken."""

    async def wait(number: int) -> None:
        await wakeups[number]
        told.append(number)

    tasks = [asyncio.create_task(wait(number)) for number in range(len(wakeups))]
    await asyncio.sleep(0)
    return tasks


def test_waiters_go_on_in_the_order_of_ringing_and_only_those_that_were_rung_for() -> None:
    async def main() -> None:
        tower = WakeupBatch()
        told: list[int] = []
        wakeups = [tower.wakeup() for _ in range(4)]
        tasks = await _waiting(wakeups, told)
        for number in (2, 0, 2, 3):
            wakeups[number].set()
        await asyncio.sleep(0)
        assert told == [2, 0, 3] and not tasks[1].done()
        wakeups[1].set()
        await asyncio.gather(*tasks)
        assert told == [2, 0, 3, 1]

    asyncio.run(main())


def test_a_ring_without_a_waiter_is_forgotten() -> None:
    async def main() -> None:
        wakeup = WakeupBatch().wakeup()
        wakeup.set()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await wakeup

    asyncio.run(main())


def test_many_waiters_leave_turns_to_others() -> None:
    async def main() -> None:
        tower = WakeupBatch()
        told: list[int] = []
        wakeups = [tower.wakeup() for _ in range(2 * WOKEN_AT_ONCE + 1)]
        tasks = await _waiting(wakeups, told)
        for wakeup in wakeups:
            wakeup.set()
        counts = []
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            counts.append(len(told))
        assert counts[:3] == [WOKEN_AT_ONCE, 2 * WOKEN_AT_ONCE, 2 * WOKEN_AT_ONCE + 1]

    asyncio.run(main())


@pytest.mark.parametrize("rings_before", [False, True])
@pytest.mark.parametrize("rings_after", [False, True])
def test_a_cancelled_waiter_is_cancelled_once_and_the_bell_can_be_used_again(
    rings_before: bool, rings_after: bool
) -> None:
    async def main() -> None:
        tower = WakeupBatch()
        told: list[int] = []
        wakeups = [tower.wakeup(), tower.wakeup()]
        tasks = await _waiting(wakeups, told)
        if rings_before:
            wakeups[0].set()
        tasks[0].cancel()
        if rings_after:
            wakeups[0].set()
        wakeups[1].set()
        await asyncio.wait(tasks)
        assert tasks[0].cancelled() and told == [1]
        (again,) = await _waiting(wakeups[:1], told)
        await asyncio.sleep(0)
        assert not again.done()
        wakeups[0].set()
        await again

    asyncio.run(main())


def test_a_waiter_that_ends_the_process_does_not_leave_the_others_asleep() -> None:
    async def leave(wakeup: SharedWakeup) -> None:
        await wakeup
        raise SystemExit

    loop = asyncio.new_event_loop()
    tower = WakeupBatch()
    told: list[int] = []
    wakeups = [tower.wakeup() for _ in range(3)]
    try:
        tasks = loop.run_until_complete(_waiting(wakeups[1:], told))
        leaver = loop.create_task(leave(wakeups[0]))
        loop.run_until_complete(asyncio.sleep(0))
        for wakeup in wakeups:
            wakeup.set()
        with pytest.raises(SystemExit):
            loop.run_until_complete(asyncio.sleep(0.01))
        loop.run_until_complete(asyncio.gather(*tasks))
        assert sorted(told) == [0, 1] and isinstance(leaver.exception(), SystemExit)
    finally:
        loop.close()


def test_a_function_can_wait_for_a_bell_that_no_task_has_waited_for() -> None:
    async def main() -> None:
        wakeup, told = WakeupBatch().wakeup(), []
        wakeup.add_done_callback(told.append, context=copy_context())
        wakeup.set()
        assert not told
        await asyncio.sleep(0)
        assert told == [wakeup] and wakeup.waiter is None

    asyncio.run(main())


async def _relay(tower: WakeupBatch, told: list[str], length: int) -> None:
    """Tasks in a row, each of which wakes the next. The first is woken, and another callback records its place in
    the order."""
    wakeups = [Wakeup(tower) for _ in range(length + 1)]

    async def pass_on(place: int) -> None:
        await wakeups[place].wait()
        told.append(f"task {place}")
        wakeups[place + 1].set()

    tasks = [asyncio.create_task(pass_on(place)) for place in range(length)]
    await asyncio.sleep(0)
    wakeups[0].set()
    asyncio.get_running_loop().call_soon(told.append, "somebody else")
    await asyncio.gather(*tasks)


def test_a_task_woken_by_a_woken_task_runs_in_the_same_turn_up_to_a_limit() -> None:
    told: list[str] = []
    asyncio.run(_relay(WakeupBatch(at_once=3), told, 4))
    assert told == ["task 0", "task 1", "task 2", "somebody else", "task 3"]


def test_where_each_has_a_turn_of_its_own_others_come_between() -> None:
    told: list[str] = []
    asyncio.run(_relay(SeparateWakeups(), told, 3))
    assert told == ["task 0", "somebody else", "task 1", "task 2"]


@pytest.mark.parametrize("tower", [WakeupBatch(), SeparateWakeups()])
def test_one_that_is_cancelled_on_its_way_leaves_the_ring_to_the_next(tower: WakeupBatch) -> None:
    async def main() -> None:
        wakeup = Wakeup(tower)
        waiting = asyncio.create_task(wakeup.wait())
        await asyncio.sleep(0)
        wakeup.set()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        await asyncio.wait_for(wakeup.wait(), 60.0)
        assert not wakeup.is_set

    asyncio.run(main())
