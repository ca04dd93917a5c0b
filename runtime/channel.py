"""A bounded queue between two stages, and a lane for control messages that must never wait."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

from .message import message
from .wakeups import Wakeup

T = TypeVar("T")


class ChannelClosed(Exception):
    """The channel is closed to senders. Items queued before the close still reach the receiver."""


class ChannelOverrun(AssertionError):
    """A channel bounded by credits was full: a credit was spent twice."""


@message
class ChannelStats:
    """One reading of a channel's counters. `num_sent` = `num_received` + `depth`."""

    capacity: int
    depth: int
    high_water: int
    num_sent: int
    num_received: int
    seconds_full: float  # time in which a sender would have had to wait
    seconds_empty: float  # time in which nothing was queued


class Permit(Generic[T]):
    """Room for one item, held until it is used or released."""

    __slots__ = ("_channel",)

    def __init__(self, channel: Channel[T]) -> None:
        self._channel: Channel[T] | None = channel

    def send(self, item: T) -> None:
        """Queues `item` in the reserved room. Call it once.

        Raises `ChannelClosed` if the channel was closed since.
        """
        channel, self._channel = self._channel, None
        if channel is None:
            raise RuntimeError("permit used twice: reserve() another one for each item")
        channel._num_promised -= 1
        channel._check_open()
        channel._put(item)

    def release(self) -> None:
        """Returns the room unused. Does nothing after `send`."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel._num_promised -= 1
            channel._wake_senders()


class Channel(Generic[T]):
    """A bounded, closable queue between two stages.

    `send` waits while `capacity` items are queued or promised; this wait is the only back-pressure.
    Waiting senders get room in order of arrival. A cancelled `send` or receive leaves the channel
    as it was: a sender cancelled after it was promised room passes the room on.
    After `close`, senders get `ChannelClosed`; the receiver still gets what was queued before its
    `async for` ends. A channel has one receiver.
    """

    def __init__(self, name: str, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        if capacity < 1:
            raise ValueError(f"channel {name}: capacity = {capacity}: must be at least 1")
        self.name = name
        self.capacity = capacity
        self.is_closed = False
        self._clock = clock
        self.queued: list[T] = []  # in order; others may read it, only `recv_all` takes from it
        self._senders: deque[asyncio.Future[None]] = deque()
        self._num_promised = 0
        self._wakeup = Wakeup()
        self._wakes: Callable[[], bool] | None = None  # whether an arrival wakes the receiver; None: always
        self._high_water = 0  # the most items taken by one `recv_all`
        self._recent_high_water = 0  # the same, since `take_high_water`
        self._num_sent = 0
        self._seconds_full = 0.0
        self._seconds_empty = 0.0
        self._full_since: float | None = None
        self._empty_since = clock()  # valid while nothing is queued
        self.waiting_since = 0.0  # when the oldest queued item came, by this channel's clock; inf if it woke no task

    def __len__(self) -> int:
        return len(self.queued)

    @property
    def num_waiting(self) -> int:
        """Senders waiting for room."""
        return len(self._senders)

    @property
    def num_promised(self) -> int:
        """Room promised to permits and to woken senders, not used yet."""
        return self._num_promised

    def listen(self, wakeup: Wakeup, wakes: Callable[[], bool] | None = None) -> None:
        """Registers the wakeup to set at the close and at arrivals.

        `wakes`: only at arrivals where it returns true.
        """
        self._wakeup = wakeup
        self._wakes = wakes
        if self.queued or self.is_closed:
            wakeup.set()

    # -- sending

    def try_send(self, item: T, now: float | None = None) -> bool:
        """Queues `item` if there is room and no sender waits. Returns whether it was queued.

        `now`: the time by this channel's clock, if the caller has just read it.
        """
        if self.is_closed:
            self._check_open()
        if self._senders or len(self.queued) + self._num_promised >= self.capacity:
            return False
        self._put(item, now)
        return True

    async def send(self, item: T) -> None:
        """Queues `item`; waits for room if there is none."""
        if not self.try_send(item):
            (await self.reserve()).send(item)

    async def reserve(self) -> Permit[T]:
        """Waits for room and holds it. The later `Permit.send` neither waits nor lacks room."""
        self._check_open()
        if self._senders or not self._has_room():
            await self._wait_for_room()
        else:
            self._num_promised += 1
        return Permit(self)

    async def _wait_for_room(self) -> None:
        promise: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._senders.append(promise)
        try:
            await promise
        except asyncio.CancelledError:
            if promise.done() and not promise.cancelled() and promise.exception() is None:
                self._num_promised -= 1
                self._wake_senders()
            else:
                self._forget(promise)
            raise

    def _forget(self, promise: asyncio.Future[None]) -> None:
        if promise in self._senders:
            self._senders.remove(promise)

    def _has_room(self) -> bool:
        return len(self.queued) + self._num_promised < self.capacity

    def _put(self, item: T, now: float | None = None) -> None:
        items = self.queued
        items.append(item)
        self._num_sent += 1
        depth = len(items)
        if depth == 1 or depth == self.capacity:
            now = self._clock() if now is None else now
            if depth == 1:
                self.waiting_since = now
                self._seconds_empty += now - self._empty_since
            if depth == self.capacity:
                self._full_since = now
        if self._wakes is None or self._wakes():
            self._wakeup.set()
        elif depth == 1:
            self.waiting_since = math.inf

    def _wake_senders(self) -> None:
        while self._senders and self._has_room():
            promise = self._senders.popleft()
            if not promise.done():
                self._num_promised += 1
                promise.set_result(None)

    # -- receiving

    def recv_all(self, now: float | None = None) -> list[T]:
        """Takes everything queued, in order, without waiting.

        Returns an empty list if nothing is queued. `now` as in `try_send`.
        """
        if not self.queued:
            return []
        items, self.queued = self.queued, []
        if len(items) > self._recent_high_water:
            self._recent_high_water = len(items)
            self._high_water = max(self._high_water, len(items))
        self._empty_since = now = self._clock() if now is None else now
        if self._full_since is not None:
            self._seconds_full += now - self._full_since
            self._full_since = None
        if self._senders:
            self._wake_senders()
        return items

    def peek(self, most: int) -> list[T]:
        """The first `most` queued items. They stay queued."""
        return self.queued[:most]

    def __aiter__(self) -> AsyncIterator[T]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[T]:
        while True:
            for item in self.recv_all():
                yield item
            if self.is_closed and not self.queued:
                return
            if not self.queued:
                await self._wakeup.wait()

    # -- ending

    def close(self) -> None:
        """Ends sending. Waiting senders get `ChannelClosed`; the receiver gets what is queued.

        Idempotent.
        """
        if self.is_closed:
            return
        self.is_closed = True
        for promise in self._senders:
            if not promise.done():
                promise.set_exception(ChannelClosed(f"channel {self.name} was closed while a sender waited for room"))
        self._senders.clear()
        self._wakeup.set()

    def take_high_water(self) -> int:
        """The most items queued at once since the last call."""
        highest, self._recent_high_water = max(self._recent_high_water, len(self.queued)), len(self.queued)
        return highest

    def _check_open(self) -> None:
        if self.is_closed:
            raise ChannelClosed(f"channel {self.name} is closed and takes nothing more")

    def stats(self) -> ChannelStats:
        """The counters, with times up to now."""
        now = self._clock()
        return ChannelStats(
            capacity=self.capacity,
            depth=len(self.queued),
            high_water=max(self._high_water, len(self.queued)),
            num_sent=self._num_sent,
            num_received=self._num_sent - len(self.queued),
            seconds_full=self._seconds_full + (now - self._full_since if self._full_since is not None else 0.0),
            seconds_empty=self._seconds_empty + (0.0 if self.queued else now - self._empty_since),
        )


class ControlLane:
    """Control messages about sequences: `cancel`, `deadline`, `finish`, `park` and others.

    A map from sequence id to one cause. It holds at most one cause per live sequence, so `post` never blocks. One
    reader takes all of it at once. The first cause that ends a sequence stays, as a request ends once; a later post
    replaces `park` and `unpark`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_set = False  # whether the reader was woken since its last `take`
        self._causes: dict[int, str] = {}
        self._wakeup = Wakeup()

    def __len__(self) -> int:
        return len(self._causes)

    def listen(self, wakeup: Wakeup) -> None:
        """Sets the wakeup that rings at each post."""
        self._wakeup = wakeup
        if self.is_set:
            wakeup.set()

    def set(self) -> None:
        """Wakes the reader, even if nothing was posted."""
        self.is_set = True
        self._wakeup.set()

    def post(self, sequence_id: int, cause: str) -> None:
        """Posts `cause` for `sequence_id` and wakes the reader."""
        if self._causes.get(sequence_id) in (None, "park", "unpark"):
            self._causes[sequence_id] = cause
        self.set()

    def take(self) -> dict[int, str]:
        """Everything posted since the last `take`, in order of posting."""
        causes, self._causes, self.is_set = self._causes, {}, False
        return causes
