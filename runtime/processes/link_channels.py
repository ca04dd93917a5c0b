"""The two halves of a channel that crosses a link."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from ..channel import Channel
from .frames import CLOSE, ITEM, LinkError
from .wire import WireError

T = TypeVar("T")


class Carrier(Protocol):
    """What a link offers to the channels that cross it."""

    def carry(self, kind: int, edge: int, message: Any = None) -> None:
        """Sends a frame with a message, or keeps it until the other end has said hello, in order.

        Raises `WireError` if it cannot be encoded. When that shows after the hello, the channel's `refuse` is called.
        """

    def wake(self) -> None:
        """Sends what is due at the next turn of the loop."""


class OutboundChannel(Channel[T], Generic[T]):
    """The sending half of a channel that crosses a link.

    Senders use it like any other channel: `send` waits while `capacity` items are on the other side and not received,
    or promised.

    Without a link, items are kept here. When a link is lost, the items it carried are dropped, as it is unknown which
    were received. `on_refused` gets an item that cannot be encoded; the item then counts as received. `on_send` is
    called with each item, also with those that `hold` drops.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        clock: Callable[[], float] = time.monotonic,
        on_send: Callable[[T], object] | None = None,
        on_refused: Callable[[T, WireError], object] | None = None,
    ) -> None:
        super().__init__(name, capacity, clock)
        self._link: Carrier | None = None
        self._edge = 0
        self._on_send = on_send
        self._on_refused = on_refused
        self.on_room: Callable[[], object] | None = None  # called when there may be room for more
        self._kept: deque[T] = deque()  # items kept until there is a link; they are in `queued` too
        self._passes: Callable[[T], bool] | None = None  # the items that are not dropped; None: all

    def hold(self, passes: Callable[[T], bool]) -> None:
        """Drops what is kept, and from now on each item for which `passes` is false, until `release`.

        For a sender that remembers its items (`on_send`) and sends them again.
        """
        self._passes = passes
        if self._kept:
            self._kept.clear()
            self.queued.clear()
            self._on_capacity_freed()

    def release(self) -> None:
        """Ends `hold`."""
        self._passes = None

    def _put(self, item: T, now: float | None = None) -> None:
        if self._on_send is not None:
            self._on_send(item)
        if self._passes is not None and not self._passes(item):
            return
        if self._link is None:
            self._kept.append(item)
        elif not self._carry(item):
            return
        super()._put(item, now)

    def _carry(self, item: T) -> bool:
        """Sends the item over the link. Returns False if it was refused."""
        assert self._link is not None
        try:
            self._link.carry(ITEM, self._edge, item)
        except WireError as error:
            if self._on_refused is None:
                raise
            self._on_refused(item, error)
            return False
        return True

    def refuse(self, item: T, error: WireError) -> None:
        """The link cannot send an item that it had kept. It counts as received."""
        if self._on_refused is None:
            raise error
        self.queued[:] = [queued for queued in self.queued if queued is not item]
        self._on_capacity_freed()
        self._on_refused(item, error)

    def bind(self, link: Carrier, edge: int) -> None:
        self._link, self._edge = link, edge
        kept, self._kept = self._kept, deque()
        self.queued.clear()
        self.queued.extend(item for item in kept if self._carry(item))
        if self.is_closed:
            link.carry(CLOSE, edge)
        self._on_capacity_freed()

    def unbind(self) -> None:
        self._link = None
        self.queued.clear()
        self._on_capacity_freed()

    def pay(self, count: int) -> None:
        """The other side received `count` items."""
        if count > len(self.queued):
            raise LinkError(f"edge {self.name}: {count} credits for {len(self.queued)} items")
        depth = len(self.queued)
        self._recent_high_water = max(self._recent_high_water, depth)
        self._high_water = max(self._high_water, depth)
        del self.queued[:count]
        self._on_capacity_freed()

    def _on_capacity_freed(self) -> None:
        now = self._clock()
        if self._full_since is not None and len(self.queued) < self.capacity:
            self._seconds_full += now - self._full_since
            self._full_since = None
        if not self.queued:
            self._empty_since = now
        self._wake_senders()
        if self.on_room is not None:
            self.on_room()

    def close(self) -> None:
        if not self.is_closed and self._link is not None:
            self._link.carry(CLOSE, self._edge)
        super().close()


class InboundChannel(Channel[T], Generic[T]):
    """The receiving half: queues what arrives; receiving returns credits to the sender.

    When its link is lost, it stays with what had arrived, and may be bound to another link. `on_arrival` is called with
    each item before it is queued.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        clock: Callable[[], float] = time.monotonic,
        on_arrival: Callable[[T], object] | None = None,
    ) -> None:
        super().__init__(name, capacity, clock)
        self._link: Carrier | None = None
        self._on_arrival = on_arrival
        self._num_owned = 0  # items that came over the current link; only these return credits
        self.num_owed = 0  # credits to send at the next turn

    def recv_all(self, now: float | None = None) -> list[T]:
        items = super().recv_all(now)
        if items and self._link is not None:
            self.num_owed += self._num_owned
            self._num_owned = 0
            self._link.wake()
        return items

    def arrive(self, item: T) -> None:
        if self._num_owned + self.num_owed >= self.capacity:
            raise LinkError(f"edge {self.name}: an item came without a credit: it holds {self.capacity}")
        self._num_owned += 1
        if self._on_arrival is not None:
            self._on_arrival(item)
        if not self.is_closed:
            self._put(item)

    def bind(self, link: Carrier, edge: int) -> None:
        self._link, self._num_owned, self.num_owed = link, 0, 0

    def unbind(self) -> None:
        self._link, self._num_owned, self.num_owed = None, 0, 0
