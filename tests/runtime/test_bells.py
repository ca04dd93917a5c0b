"""Bells of many waiters: the order in which tasks are woken, cancelled waiters, and turns for others between."""

from __future__ import annotations

import asyncio
from contextvars import copy_context

import pytest

from millrace.runtime.bells import WOKEN_AT_ONCE, BellTower, SharedBell


async def _waiting(bells: list[SharedBell], told: list[int]) -> list[asyncio.Task[None]]:
    """A task for each bell, which waits now, and says its number when it goes on."""

    async def wait(number: int) -> None:
        await bells[number]
        told.append(number)

    tasks = [asyncio.create_task(wait(number)) for number in range(len(bells))]
    await asyncio.sleep(0)
    return tasks


def test_waiters_go_on_in_the_order_of_ringing_and_only_those_that_were_rung_for() -> None:
    async def main() -> None:
        tower = BellTower()
        told: list[int] = []
        bells = [tower.bell() for _ in range(4)]
        tasks = await _waiting(bells, told)
        for number in (2, 0, 2, 3):
            bells[number].ring()
        await asyncio.sleep(0)
        assert told == [2, 0, 3] and not tasks[1].done()
        bells[1].ring()
        await asyncio.gather(*tasks)
        assert told == [2, 0, 3, 1]

    asyncio.run(main())


def test_a_ring_that_nobody_waits_for_is_forgotten() -> None:
    async def main() -> None:
        bell = BellTower().bell()
        bell.ring()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await bell

    asyncio.run(main())


def test_many_waiters_leave_turns_to_others() -> None:
    async def main() -> None:
        tower = BellTower()
        told: list[int] = []
        bells = [tower.bell() for _ in range(2 * WOKEN_AT_ONCE + 1)]
        tasks = await _waiting(bells, told)
        for bell in bells:
            bell.ring()
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
        tower = BellTower()
        told: list[int] = []
        bells = [tower.bell(), tower.bell()]
        tasks = await _waiting(bells, told)
        if rings_before:
            bells[0].ring()
        tasks[0].cancel()
        if rings_after:
            bells[0].ring()
        bells[1].ring()
        await asyncio.wait(tasks)
        assert tasks[0].cancelled() and told == [1]
        (again,) = await _waiting(bells[:1], told)
        await asyncio.sleep(0)
        assert not again.done()
        bells[0].ring()
        await again

    asyncio.run(main())


def test_a_waiter_that_ends_the_process_does_not_leave_the_others_asleep() -> None:
    async def leave(bell: SharedBell) -> None:
        await bell
        raise SystemExit

    loop = asyncio.new_event_loop()
    tower = BellTower()
    told: list[int] = []
    bells = [tower.bell() for _ in range(3)]
    try:
        tasks = loop.run_until_complete(_waiting(bells[1:], told))
        leaver = loop.create_task(leave(bells[0]))
        loop.run_until_complete(asyncio.sleep(0))
        for bell in bells:
            bell.ring()
        with pytest.raises(SystemExit):
            loop.run_until_complete(asyncio.sleep(0.01))
        loop.run_until_complete(asyncio.gather(*tasks))
        assert sorted(told) == [0, 1] and isinstance(leaver.exception(), SystemExit)
    finally:
        loop.close()


def test_a_function_can_wait_for_a_bell_that_no_task_has_waited_for() -> None:
    async def main() -> None:
        bell, told = BellTower().bell(), []
        bell.add_done_callback(told.append, context=copy_context())
        bell.ring()
        assert not told
        await asyncio.sleep(0)
        assert told == [bell] and bell.waiter is None

    asyncio.run(main())
