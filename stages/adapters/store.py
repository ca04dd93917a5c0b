"""The adapters in host memory, by digest: bounded in number, the least recently used one is evicted.

Written on the event loop; the device thread reads from it what a step loads.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from ...model.lora.adapter import Adapter


class AdapterStore:
    """At most `max_adapters` adapters. One that a request uses, or that has a device slot, is never evicted."""

    def __init__(self, max_adapters: int, has_slot: Callable[[str], bool]) -> None:
        """`has_slot` says whether a digest has a device slot, or is being loaded into one."""
        self.max_adapters = max_adapters
        self.num_evicted = 0
        self._has_slot = has_slot
        self._adapters: OrderedDict[str, Adapter] = OrderedDict()  # the least recently used first
        self._num_users: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._adapters)

    def __contains__(self, digest: str) -> bool:
        return digest in self._adapters

    @property
    def num_bytes(self) -> int:
        """Memory of all adapters."""
        return sum(adapter.num_bytes for adapter in self._adapters.values())

    def num_users(self, digest: str) -> int:
        """Requests in progress that use an adapter."""
        return self._num_users[digest]

    def get(self, digest: str) -> Adapter:
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

    def add(self, adapter: Adapter) -> bool:
        """Stores an adapter; False if those in use leave no room. One of the same digest stays."""
        if adapter.digest in self._adapters:
            return True
        while len(self._adapters) >= self.max_adapters:
            unused = next((digest for digest in self._adapters if not self._is_needed(digest)), None)
            if unused is None:
                return False
            del self._adapters[unused]
            self.num_evicted += 1
        self._adapters[adapter.digest] = adapter
        return True

    def drop(self, digest: str) -> None:
        """Frees an adapter without a name, unless it is still needed: then it is evicted later."""
        if digest in self._adapters and not self._is_needed(digest):
            del self._adapters[digest]

    def _is_needed(self, digest: str) -> bool:
        return self._num_users[digest] > 0 or self._has_slot(digest)
