"""Bells, and how they wake the tasks that wait for them: those that are rung together in one callback of the loop.

Knows what a task asks of what it awaits. Refuses to know who waits, and for what.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextvars import Context

WOKEN_AT_ONCE = 32  # before others have their turn

Callback = Callable[["SharedBell"], object]


class BellTower:
    """Wakes who waits for its bells, in the order in which they were rung, and with them whoever is rung for meanwhile.
    All wait on one loop, which has its turn after `at_once` of them."""

    def __init__(self, at_once: int = WOKEN_AT_ONCE) -> None:
        self._at_once = at_once
        self._rung: deque[SharedBell] = deque()
        self._is_due = False

    def bell(self) -> SharedBell:
        """A new bell, which nobody waits for."""
        return SharedBell(self)

    def ring(self, bells: Iterable[SharedBell]) -> None:
        """Rings each: as `bell.ring()`, for less. None of them is a `Bell`, which has to remember."""
        rung = self._rung
        for bell in bells:
            if bell.waiter is not None and not bell.is_going:
                bell.is_going = True
                rung.append(bell)
        if rung and not self._is_due:
            self._is_due = True
            self._call_soon(rung[0])

    def wake(self, bell: SharedBell) -> None:
        """Has the waiter of `bell` woken soon."""
        self._rung.append(bell)
        if not self._is_due:
            self._is_due = True
            self._call_soon(bell)

    def _call_soon(self, bell: SharedBell) -> None:
        assert bell._loop is not None, "a bell is on its way to somebody, who has waited"
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
        finally:  # a task may raise SystemExit, and that ends this callback
            self._is_due = len(rung) > 0
            if self._is_due:
                self._call_soon(rung[0])


class OwnTurns(BellTower):
    """Wakes each in a callback of its own, as a future does: in simulation, which draws the order of callbacks."""

    def ring(self, bells: Iterable[SharedBell]) -> None:
        for bell in bells:
            bell.ring()

    def wake(self, bell: SharedBell) -> None:
        waiter, bell.waiter, bell.is_going = bell.waiter, None, False
        assert waiter is not None and bell._loop is not None, "a bell wakes somebody, who has waited"
        callback, context = waiter
        bell._loop.call_soon(callback, bell, context=context)


class SharedBell:
    """A bell of a tower. It is itself what its one waiter awaits, who has looked before whether there is need to: it
    remembers nothing.

    A task takes for a future whatever has `_asyncio_future_blocking` (see `asyncio.isfuture`) and the methods below. A
    real one would cost each waiter a future and a handle of the loop.
    """

    __slots__ = ("_asyncio_future_blocking", "_is_cancelled", "_loop", "_tower", "is_going", "waiter")

    def __init__(self, tower: BellTower) -> None:
        self._asyncio_future_blocking = False
        self._tower = tower
        self._loop: asyncio.AbstractEventLoop | None = None  # of who waits, or waited last; tasks look here
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
        return iter((self,))  # type: ignore[return-value]  # yields itself once, for less than a generator would

    # -- what a task asks of a future

    def add_done_callback(self, callback: Callback, *, context: Context) -> None:
        """The next ring calls `callback`, soon and once. For whoever need not be a task, too."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self.waiter = (callback, context)

    def cancel(self, msg: object = None) -> bool:
        """The waiting task is cancelled. False if it is about to go on as it is."""
        if self.waiter is None or self.is_going:
            return False
        self._is_cancelled = self.is_going = True
        self._tower.wake(self)
        return True

    def result(self) -> None:
        was_cancelled, self._is_cancelled = self._is_cancelled, False
        if was_cancelled:
            raise asyncio.CancelledError


ALONE = OwnTurns()  # for a bell that has no tower


class Bell(SharedBell):
    """A bell that remembers: who comes after it rang need not wait.

    `if not bell.is_rung: await bell`, and then `bell.is_rung = False`, is `wait` without the price of a coroutine each
    time. One waiter at a time.
    """

    __slots__ = ("is_rung",)

    def __init__(self, tower: BellTower = ALONE) -> None:
        super().__init__(tower)
        self.is_rung = False  # since it was last heard

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
