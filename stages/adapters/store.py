"""The adapters in host memory, by digest: bounded in number, the least recently used one is evicted.

Written on the event loop; the device thread reads from it what a step loads.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from .reader import StoredAdapter

T = TypeVar("T", bound=StoredAdapter)


class AdapterStore(Generic[T]):
    """At most `max_adapters` adapters. One that a request uses, or that has a device slot, is never evicted."""

    def __init__(
        self,
        max_adapters: int,
        has_slot: Callable[[str], bool],
        on_drop: Callable[[str], object] | None = None,
        max_bytes: int | None = None,
        num_slots: int = 0,
    ) -> None:
        """`has_slot` says whether a digest has a device slot, or is being loaded into one.

        `on_drop` is called with the digest of each adapter that is freed. Adapters with device slots may take more than
        `max_bytes`, and so may one beside them. Where `has_slot` cannot know, up to `num_slots` have one.
        """
        self.max_adapters = max_adapters
        self.max_bytes = math.inf if max_bytes is None else max_bytes
        self.num_slots = num_slots
        self.num_evicted = 0
        self.pinned: frozenset[str] = frozenset()  # adapters that are never evicted
        self.num_reserved = 0  # adapters that are being read
        self.num_bytes_reserved = 0  # their size, as far as it is known
        self._has_slot, self._on_drop = has_slot, on_drop
        self._adapters: OrderedDict[str, T] = OrderedDict()  # the least recently used first
        self._num_users: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._adapters)

    def __contains__(self, digest: str) -> bool:
        return digest in self._adapters

    @property
    def num_bytes(self) -> int:
        """Memory of all adapters."""
        return sum(adapter.num_bytes for adapter in self._adapters.values())

    def digests(self) -> list[str]:
        """All adapters, the least recently used first."""
        return list(self._adapters)

    def num_users(self, digest: str) -> int:
        """Requests in progress that use an adapter."""
        return self._num_users.get(digest, 0)

    def get(self, digest: str) -> T:
        """An adapter that a step loads. It is there: it is kept from before the step was planned."""
        return self._adapters[digest]

    def use(self, digest: str) -> bool:
        """Adds a user if the adapter is here; returns whether it is."""
        if digest not in self._adapters:
            return False
        self._adapters.move_to_end(digest)
        self._num_users[digest] += 1
        return True

    def release(self, digest: str) -> None:
        """Removes a user."""
        self._num_users[digest] -= 1
        if not self._num_users[digest]:
            del self._num_users[digest]

    def reserve(self, num_bytes: int = 0) -> bool:
        """Makes room for one adapter, which `add` or `cancel_reservation` takes; False if those in use leave none."""
        while not self._has_room(num_bytes):
            unused = next((digest for digest in self._adapters if not self._is_needed(digest)), None)
            if unused is None:
                return False
            self.lose(unused)
            self.num_evicted += 1
        self.num_reserved += 1
        self.num_bytes_reserved += num_bytes
        return True

    def cancel_reservation(self, num_bytes: int = 0) -> None:
        """Gives back the room of an adapter that could not be read."""
        self.num_reserved -= 1
        self.num_bytes_reserved -= num_bytes

    def add(self, adapter: T, num_bytes: int = 0) -> None:
        """Stores an adapter in reserved room. One of the same digest stays."""
        self.cancel_reservation(num_bytes)
        self._adapters.setdefault(adapter.digest, adapter)

    def find_to_drain(self) -> str | None:
        """The least recently used adapter that requests use, one without a device slot if there is one."""
        in_use = [digest for digest in self._adapters if self.num_users(digest) and digest not in self.pinned]
        return min(in_use, key=self._has_slot, default=None)

    def drop(self, digest: str) -> None:
        """Frees an adapter without a name, which is not pinned, unless it is needed: then it is evicted later."""
        if digest in self._adapters and not self._is_needed(digest):
            self.lose(digest)

    def lose(self, digest: str) -> None:
        """Frees an adapter, whether it is needed or not; one that is not here any more is passed over."""
        if self._adapters.pop(digest, None) is not None and self._on_drop is not None:
            self._on_drop(digest)

    def _has_room(self, num_bytes: int) -> bool:
        if len(self._adapters) + self.num_reserved >= self.max_adapters:
            return False
        if self.num_bytes + self.num_bytes_reserved + num_bytes <= self.max_bytes:
            return True
        if self.num_reserved:
            return False
        others = [digest for digest in self._adapters if digest not in self.pinned]
        return len(others) <= self.num_slots or all(map(self._has_slot, others))  # none becomes free

    def _is_needed(self, digest: str) -> bool:
        return self.num_users(digest) > 0 or digest in self.pinned or self._has_slot(digest)
