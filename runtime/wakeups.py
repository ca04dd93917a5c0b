"""Wakeups for tasks, coalesced into one loop callback.

A task awaits a `Wakeup` or `SharedWakeup`; `set` wakes it. Wakeups that are set together wake their tasks in one
callback of the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextvars import Context

WOKEN_AT_ONCE = 32  # before other callbacks of the loop run

Callback = Callable[["SharedWakeup"], object]


class WakeupBatch:
    """Wakes the waiters of its wakeups in the order in which they were set, several in one loop callback.

    After `at_once` of them the loop runs other callbacks. All waiters must be on one loop.
    """

    def __init__(self, at_once: int = WOKEN_AT_ONCE) -> None:
        self._at_once = at_once
        self._set: deque[SharedWakeup] = deque()
        self._is_due = False

    def wakeup(self) -> SharedWakeup:
        """A new wakeup without a waiter."""
        return SharedWakeup(self)

    def set(self, wakeups: Iterable[SharedWakeup]) -> None:
        """Sets each of `wakeups`; cheaper than calling `set` of each.

        None may be a `Wakeup`: its `is_set` would stay False.
        """
        rung = self._set
        for wakeup in wakeups:
            if wakeup.waiter is not None and not wakeup.is_going:
                wakeup.is_going = True
                rung.append(wakeup)
        if rung and not self._is_due:
            self._is_due = True
            self._call_soon(rung[0])

    def wake(self, wakeup: SharedWakeup) -> None:
        """Schedules the waiter of `wakeup` to be woken."""
        self._set.append(wakeup)
        if not self._is_due:
            self._is_due = True
            self._call_soon(wakeup)

    def _call_soon(self, wakeup: SharedWakeup) -> None:
        assert wakeup._loop is not None, "a wakeup is scheduled that has no waiter"
        wakeup._loop.call_soon(self._wake_some)

    def _wake_some(self) -> None:
        rung, left = self._set, self._at_once
        try:
            while rung and left:
                left -= 1
                wakeup = rung.popleft()
                waiter, wakeup.waiter, wakeup.is_going = wakeup.waiter, None, False
                assert waiter is not None
                callback, context = waiter
                context.run(callback, wakeup)
        finally:  # a task may raise SystemExit, which ends this callback
            self._is_due = len(rung) > 0
            if self._is_due:
                self._call_soon(rung[0])


class SeparateWakeups(WakeupBatch):
    """Wakes each waiter in a callback of its own, as a future does.

    For simulation, which draws their order.
    """

    def set(self, wakeups: Iterable[SharedWakeup]) -> None:
        for wakeup in wakeups:
            wakeup.set()

    def wake(self, wakeup: SharedWakeup) -> None:
        waiter, wakeup.waiter, wakeup.is_going = wakeup.waiter, None, False
        assert waiter is not None and wakeup._loop is not None, "a wakeup is scheduled that has no waiter"
        callback, context = waiter
        wakeup._loop.call_soon(callback, wakeup, context=context)


class SharedWakeup:
    """A wakeup of a `WakeupBatch`, with one waiter.

    It does not remember that it was set, so the waiter checks its condition before it waits.

    It is itself the awaited object: asyncio accepts anything with `_asyncio_future_blocking` (see `asyncio.isfuture`)
    and the methods below as a future. A real future would cost each waiter an object and a handle of the loop.
    """

    __slots__ = ("_asyncio_future_blocking", "_is_cancelled", "_loop", "_group", "is_going", "waiter")

    def __init__(self, group: WakeupBatch) -> None:
        self._asyncio_future_blocking = False
        self._group = group
        self._loop: asyncio.AbstractEventLoop | None = None  # of the current or last waiter; tasks read it
        self.waiter: tuple[Callback, Context] | None = None  # the group takes it
        self.is_going = False  # the waiter is about to be woken
        self._is_cancelled = False

    def set(self) -> None:
        """Wakes the waiter, if there is one."""
        if self.waiter is not None and not self.is_going:
            self.is_going = True
            self._group.wake(self)

    def __await__(self) -> Generator[SharedWakeup, None, None]:
        """Waits for the next `set`. One waiter at a time."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self._asyncio_future_blocking = True
        return iter((self,))  # type: ignore[return-value]  # yields itself once, cheaper than a generator

    # -- the interface of a future

    def add_done_callback(self, callback: Callback, *, context: Context) -> None:
        """The next `set` calls `callback`, once. Also for callers that are not tasks."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self.waiter = (callback, context)

    def cancel(self, msg: object = None) -> bool:
        """Cancels the waiting task. Returns False if it is already about to be woken."""
        if self.waiter is None or self.is_going:
            return False
        self._is_cancelled = self.is_going = True
        self._group.wake(self)
        return True

    def result(self) -> None:
        was_cancelled, self._is_cancelled = self._is_cancelled, False
        if was_cancelled:
            raise asyncio.CancelledError


ALONE = SeparateWakeups()  # for a wakeup without a batch of its own


class Wakeup(SharedWakeup):
    """A wakeup that remembers that it was set: a later `wait` returns at once.

    `if not wakeup.is_set: await wakeup`, then `wakeup.is_set = False`, does the same as `wait` without the cost of a
    coroutine. One waiter at a time.
    """

    __slots__ = ("is_set",)

    def __init__(self, group: WakeupBatch = ALONE) -> None:
        super().__init__(group)
        self.is_set = False  # since the last `wait`

    def set(self) -> None:
        """Wakes the waiter, or lets the next `wait` return at once."""
        self.is_set = True
        if self.waiter is not None and not self.is_going:
            self.is_going = True
            self._group.wake(self)

    async def wait(self) -> None:
        """Returns after the next `set`, or at once if it was set since the last `wait`."""
        while not self.is_set:
            await self
        self.is_set = False


class OncePerTurn(Wakeup):
    """Calls `react` in the next turn of the event loop, once for all times that it is set before."""

    __slots__ = ("_is_due", "_react")

    def __init__(self, react: Callable[[], object]) -> None:
        super().__init__()
        self._react = react
        self._is_due = False

    def set(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn, context=Context())

    def _turn(self) -> None:
        self._is_due = False
        self._react()
