"""A thread that prepares items ahead of the thread that uses them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from .thread_start import start_thread

Item = TypeVar("Item")
Ready = TypeVar("Ready")


class AheadThread(Generic[Item, Ready]):
    """Calls `prepare` for each item that is offered, in order, on a thread of its own. Items are told by identity.

    `prepare` must not raise: what it returns says whether it has failed.
    """

    def __init__(self, name: str, prepare: Callable[[Item], Ready]) -> None:
        """Starts the thread. Raises `ThreadNotStarted`."""
        self._prepare = prepare
        self._changed = threading.Condition()
        self._offered: deque[Item] = deque()  # and not taken
        self._waiting: deque[Item] = deque()  # of these, not prepared
        self._ready: deque[tuple[Item, Ready]] = deque()  # the others
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        start_thread(self._thread)

    def offer(self, item: Item) -> None:
        """Prepares an item after those before it. Called on any thread."""
        with self._changed:
            self._offered.append(item)
            self._waiting.append(item)
            self._changed.notify_all()

    def take(self, item: Item) -> Iterator[Ready]:
        """What was made of the items up to `item`, which is offered now if it was not. Waits for each.

        Ends early after `close`.
        """
        with self._changed:
            is_offered = any(each is item for each in self._offered)
        if not is_offered:
            self.offer(item)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._is_closed)
                if not self._ready:
                    return
                self._offered.popleft()
                found, ready = self._ready.popleft()
            yield ready
            if found is item:
                return

    def close(self) -> None:
        """Ends the thread, once it has prepared the item in its hands. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                item = self._waiting.popleft()
            ready = self._prepare(item)
            with self._changed:
                self._ready.append((item, ready))
                self._changed.notify_all()
