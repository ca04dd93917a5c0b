"""What strangers may cost a process that listens: CPU time for handshakes, shared between the addresses they come from.

A handshake of TLS takes milliseconds of CPU, and the loop that does it also serves requests. So the handshakes of a
port take a share of one core at most, once they have used a burst; meanwhile each waits for its turn. Another share is
for accepting connections: those that only connect leave the share of handshakes to others.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")

SHARE = 0.1  # of a core, for long
BURST_S = 0.5  # of CPU time, after a while without handshakes: enough for all fronts that an engine may have
ACCEPT_S = 1e-4  # of CPU time, to accept a connection
APART_S = 1e-3  # between two turns: by then most of what the first one costs is known
LEAST_S = 0.1  # a handshake that waits gets a turn at least so often, whatever was used
HALF_LIFE_S = 10.0  # of what an address has used
MAX_ADDRESSES = 256  # whose use is remembered
NETWORK_BITS = 64  # of IPv6 addresses: one owner has all of the others


def source_of(address: str) -> str:
    """Whom a connection comes from: an IPv4 address, or the network of an IPv6 one."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return address
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(ip), NETWORK_BITS), strict=False))


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

    The next is by turns the oldest one, and that of the source which has used the least of late (see `source_of`), so
    neither many connections nor many addresses keep another from its turn. Belongs to one loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.budget = CpuBudget(self._loop.time())  # for handshakes that had their turn
        self.accepting = CpuBudget(self._loop.time())  # for connections until then
        self._used_s: dict[str, tuple[float, float]] = {}  # by source: how much, and when that was so
        self._before: set[asyncio.Task[Any] | None] = set()  # those that had no turn yet
        self._waiting: dict[asyncio.Future[None], str] = {}  # to the source, in order of arrival
        self._timer: asyncio.TimerHandle | None = None
        self._given_s = self._loop.time()  # the last turn
        self._oldest_is_next = False

    async def may_accept(self) -> None:
        """Returns when one more connection may be accepted; after far too much use the system lets a few wait."""
        if (pause_s := self.accepting.pause_s(self._loop.time(), bursts=1.0)) > 0.0:
            await asyncio.sleep(pause_s)
        self.accepting.use(ACCEPT_S, self._loop.time())

    async def run(self, address: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs all that is done for a connection of an address, and counts its CPU time."""
        source, task = source_of(address), asyncio.current_task()
        self._before.add(task)
        try:
            return await _counted(work(), lambda cost_s: self._use(source, cost_s, task in self._before))
        finally:
            self._before.discard(task)

    async def turn(self, address: str) -> None:
        """Returns when a handshake with an address may begin."""
        now_s = self._loop.time()
        if self._waiting or self.budget.left_s(now_s) <= 0.0:
            await self._wait(source_of(address))
        else:
            self._given_s = now_s
        self._before.discard(asyncio.current_task())

    def close(self) -> None:
        """Stops the timer. Handshakes that wait must have been cancelled."""
        if self._timer is not None:
            self._timer.cancel()

    async def _wait(self, source: str) -> None:
        turn = self._loop.create_future()
        self._waiting[turn] = source
        self._plan()
        try:
            await turn
        finally:
            self._waiting.pop(turn, None)

    def _plan(self) -> None:
        if self._timer is None and self._waiting:
            now_s = self._loop.time()
            pause_s = min(self.budget.pause_s(now_s), max(0.0, self._given_s + LEAST_S - now_s))
            self._timer = self._loop.call_later(pause_s + APART_S, self._give)

    def _give(self) -> None:
        """Lets one handshake begin."""
        self._timer, now_s = None, self._loop.time()
        if self._waiting and (self.budget.left_s(now_s) > 0.0 or now_s >= self._given_s + LEAST_S):
            turn = self._next(now_s)
            del self._waiting[turn]
            if not turn.done():
                turn.set_result(None)
                self._given_s, self._oldest_is_next = now_s, not self._oldest_is_next
        self._plan()

    def _next(self, now_s: float) -> asyncio.Future[None]:
        if self._oldest_is_next:
            return next(iter(self._waiting))
        return min(self._waiting, key=lambda one: self._used_of(self._waiting[one], now_s))  # the first of equals

    def _used_of(self, source: str, now_s: float) -> float:
        used_s, then_s = self._used_s.get(source, (0.0, now_s))
        return float(used_s * 0.5 ** ((now_s - then_s) / HALF_LIFE_S))

    def _use(self, source: str, cost_s: float, is_before: bool) -> None:
        now_s = self._loop.time()
        if self.budget.is_whole(now_s):
            self._used_s.clear()
        used_s = self._used_of(source, now_s) + cost_s
        self._used_s.pop(source, None)
        self._used_s[source] = used_s, now_s
        if len(self._used_s) > MAX_ADDRESSES:
            del self._used_s[next(iter(self._used_s))]
        (self.accepting if is_before else self.budget).use(cost_s, now_s)


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
