"""Things that are done once each, in their order, by whichever of two threads needs them first."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class InOrder(Generic[T]):
    """`wait(item)` returns when an item may be done; both threads may wait for one. `do(item)` is called once, when
    those before it are done, by one thread at a time. What either raises is raised to who called; the item is then
    still to be done.
    """

    def __init__(self, wait: Callable[[T], object], do: Callable[[T], object]) -> None:
        self._wait, self._do = wait, do
        self._items: deque[T] = deque()
        self._lock = threading.Lock()

    def append(self, item: T) -> None:
        self._items.append(item)

    def do_until(self, is_enough: Callable[[], bool]) -> None:
        """Does what is to be done, one by one, until `is_enough()` or nothing is left."""
        while True:
            with self._lock:
                if is_enough() or not self._items:
                    return
                item = self._items[0]
            self._wait(item)
            with self._lock:
                if self._items and self._items[0] is item:
                    self._do(item)
                    self._items.popleft()

    def do_all(self) -> None:
        """Until nothing is left."""
        self.do_until(lambda: False)
