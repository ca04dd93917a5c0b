"""What strangers may cost a process that listens: CPU time for handshakes, shared between the addresses they come from.

A handshake of TLS takes milliseconds of CPU, and the loop that does it also serves requests. So the handshakes of a
port take a share of one core at most, once they have used a burst; meanwhile each waits for its turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")

SHARE = 0.1  # of a core, for long
BURST_S = 0.5  # of CPU time, after a while without handshakes: enough for all fronts that an engine may have
ACCEPT_S = 1e-4  # of CPU time, to accept a connection
APART_S = 1e-3  # between two turns: by then most of what the first one costs is known
MAX_ADDRESSES = 256  # whose use is remembered


class CpuBudget:
    """CPU time that comes back with time. Does not depend on a clock: callers tell the times."""

    def __init__(self, now_s: float, share: float = SHARE, burst_s: float = BURST_S) -> None:
        self._share, self._burst_s = share, burst_s
        self._left_s, self._last_s = burst_s, now_s

    def left_s(self, now_s: float) -> float:
        """What may be used now; below 0 if too much was."""
        self._left_s = min(self._burst_s, self._left_s + self._share * (now_s - self._last_s))
        self._last_s = now_s
        return self._left_s

    def use(self, cost_s: float, now_s: float) -> None:
        """So much was used; below 0: it was less than said before."""
        self._left_s = min(self._burst_s, self.left_s(now_s) - cost_s)

    def pause_s(self, now_s: float, bursts: float = 0.0) -> float:
        """Until something may be used again; with `bursts`, until at most so many more than all were used."""
        return max(0.0, (-bursts * self._burst_s - self.left_s(now_s)) / self._share)

    def is_whole(self, now_s: float) -> bool:
        """Whether nothing was used for a while."""
        return self.left_s(now_s) >= self._burst_s


class HandshakeTurns:
    """The handshakes of one port: all at once while the budget lasts, and then one after another.

    The next is that of the address which has used the least of late, and of these the oldest. Belongs to one loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.budget = CpuBudget(self._loop.time())
        self._used_s: dict[str, float] = {}  # by address
        self._waiting: dict[asyncio.Future[None], str] = {}  # to the address, in order of arrival
        self._timer: asyncio.TimerHandle | None = None

    async def may_accept(self) -> None:
        """Returns when one more connection may be accepted; after far too much use the system lets a few wait."""
        if (pause_s := self.budget.pause_s(self._loop.time(), bursts=1.0)) > 0.0:
            await asyncio.sleep(pause_s)
        self.budget.use(ACCEPT_S, self._loop.time())

    async def run(self, address: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs all that is done for a connection of an address, and counts its CPU time."""
        return await _counted(work(), lambda cost_s: self._use(address, cost_s))

    async def turn(self, address: str) -> None:
        """Returns when a handshake with an address may begin."""
        if not self._waiting and self.budget.left_s(self._loop.time()) > 0.0:
            return
        turn = self._loop.create_future()
        self._waiting[turn] = address
        self._plan()
        try:
            await turn
        finally:
            self._waiting.pop(turn, None)

    def close(self) -> None:
        """Stops the timer. Handshakes that wait must have been cancelled."""
        if self._timer is not None:
            self._timer.cancel()

    def _plan(self) -> None:
        if self._timer is None and self._waiting:
            pause_s = self.budget.pause_s(self._loop.time())
            self._timer = self._loop.call_later(pause_s + APART_S, self._give)

    def _give(self) -> None:
        """Lets one handshake begin."""
        self._timer = None
        if self._waiting and self.budget.left_s(self._loop.time()) > 0.0:
            turn = min(self._waiting, key=lambda one: self._used_s.get(self._waiting[one], 0.0))  # the first of equals
            del self._waiting[turn]
            if not turn.done():
                turn.set_result(None)
        self._plan()

    def _use(self, address: str, cost_s: float) -> None:
        now_s = self._loop.time()
        if self.budget.is_whole(now_s):
            self._used_s.clear()
        self._used_s[address] = self._used_s.pop(address, 0.0) + cost_s
        if len(self._used_s) > MAX_ADDRESSES:
            del self._used_s[next(iter(self._used_s))]
        self.budget.use(cost_s, now_s)


@coroutine
def _counted(work: Coroutine[Any, Any, T], count: Callable[[float], None]) -> Generator[Any, Any, T]:
    """Runs `work`, and tells `count` the CPU seconds of each of its pieces between two waits."""
    error: BaseException | None = None
    while True:
        began_s = time.thread_time()
        try:
            awaited = work.send(None) if error is None else work.throw(error)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            count(time.thread_time() - began_s)
        error = None
        try:
            yield awaited
        except BaseException as thrown:
            error = thrown
