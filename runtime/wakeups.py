"""Wakeups for tasks, coalesced into one loop callback.

A task awaits a `Bell` or `SharedBell`; `ring` wakes it. Those that ring together wake in one callback of the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextvars import Context

WOKEN_AT_ONCE = 32  # before other callbacks of the loop run

Callback = Callable[["SharedBell"], object]


class BellTower:
    """Wakes the waiters of its bells in the order of the rings, several in one loop callback.

    After `at_once` of them the loop runs other callbacks. All waiters must be on one loop.
    """

    def __init__(self, at_once: int = WOKEN_AT_ONCE) -> None:
        self._at_once = at_once
        self._rung: deque[SharedBell] = deque()
        self._is_due = False

    def bell(self) -> SharedBell:
        """A new bell without a waiter."""
        return SharedBell(self)

    def ring(self, bells: Iterable[SharedBell]) -> None:
        """Rings each, cheaper than `bell.ring()` one by one.

        None may be a `Bell`, which would have to remember.
        """
        rung = self._rung
        for bell in bells:
            if bell.waiter is not None and not bell.is_going:
                bell.is_going = True
                rung.append(bell)
        if rung and not self._is_due:
            self._is_due = True
            self._call_soon(rung[0])

    def wake(self, bell: SharedBell) -> None:
        """Schedules the waiter of `bell` to be woken."""
        self._rung.append(bell)
        if not self._is_due:
            self._is_due = True
            self._call_soon(bell)

    def _call_soon(self, bell: SharedBell) -> None:
        assert bell._loop is not None, "a wakeup is scheduled for a bell that has no waiter"
        bell._loop.call_soon(self._wake_some)

    def _wake_some(self) -> None:
        rung, left = self._rung, self._at_once
        try:
            while rung and left:
                left -= 1
                bell = rung.popleft()
                waiter, bell.waiter, bell.is_going = bell.waiter, None, False
                assert waiter is not None
                callback, context = waiter
                context.run(callback, bell)
        finally:  # a task may raise SystemExit, which ends this callback
            self._is_due = len(rung) > 0
            if self._is_due:
                self._call_soon(rung[0])


class OwnTurns(BellTower):
    """Wakes each waiter in a callback of its own, as a future does.

    For simulation, which draws their order.
    """

    def ring(self, bells: Iterable[SharedBell]) -> None:
        for bell in bells:
            bell.ring()

    def wake(self, bell: SharedBell) -> None:
        waiter, bell.waiter, bell.is_going = bell.waiter, None, False
        assert waiter is not None and bell._loop is not None, "a wakeup is scheduled for a bell that has no waiter"
        callback, context = waiter
        bell._loop.call_soon(callback, bell, context=context)


class SharedBell:
    """A wakeup of a tower, with one waiter.

    It does not remember a ring, so the waiter checks before it waits.

    It is itself the awaited object: asyncio accepts anything with `_asyncio_future_blocking` (see `asyncio.isfuture`)
    and the methods below as a future. A real future would cost each waiter an object and a handle of the loop.
    """

    __slots__ = ("_asyncio_future_blocking", "_is_cancelled", "_loop", "_tower", "is_going", "waiter")

    def __init__(self, tower: BellTower) -> None:
        self._asyncio_future_blocking = False
        self._tower = tower
        self._loop: asyncio.AbstractEventLoop | None = None  # of the current or last waiter; tasks read it
        self.waiter: tuple[Callback, Context] | None = None  # the tower takes it
        self.is_going = False  # the waiter is about to be woken
        self._is_cancelled = False

    def ring(self) -> None:
        """Wakes the waiter, if there is one."""
        if self.waiter is not None and not self.is_going:
            self.is_going = True
            self._tower.wake(self)

    def __await__(self) -> Generator[SharedBell, None, None]:
        """Waits for the next ring. One waiter at a time."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self._asyncio_future_blocking = True
        return iter((self,))  # type: ignore[return-value]  # yields itself once, cheaper than a generator

    # -- the interface of a future

    def add_done_callback(self, callback: Callback, *, context: Context) -> None:
        """Has the next ring call `callback`, once. Also for callers that are not tasks."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self.waiter = (callback, context)

    def cancel(self, msg: object = None) -> bool:
        """Cancels the waiting task. Returns False if it is already about to be woken."""
        if self.waiter is None or self.is_going:
            return False
        self._is_cancelled = self.is_going = True
        self._tower.wake(self)
        return True

    def result(self) -> None:
        was_cancelled, self._is_cancelled = self._is_cancelled, False
        if was_cancelled:
            raise asyncio.CancelledError


ALONE = OwnTurns()  # for a bell without a tower of its own


class Bell(SharedBell):
    """A wakeup that remembers a ring: a later `wait` returns at once.

    `if not bell.is_rung: await bell`, then `bell.is_rung = False`, does the same as `wait` without the cost of a
    coroutine. One waiter at a time.
    """

    __slots__ = ("is_rung",)

    def __init__(self, tower: BellTower = ALONE) -> None:
        super().__init__(tower)
        self.is_rung = False  # since the last `wait`

    def ring(self) -> None:
        """Wakes the waiter, or lets the next `wait` return at once."""
        self.is_rung = True
        if self.waiter is not None and not self.is_going:
            self.is_going = True
            self._tower.wake(self)

    async def wait(self) -> None:
        """Returns after the next ring, or at once if it rang since the last `wait`."""
        while not self.is_rung:
            await self
        self.is_rung = False
