"""Items processed once each, in order, by whichever of two threads needs them first."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class OrderTicket(Generic[T]):
    """One item in the order, and its state."""

    __slots__ = ("error", "is_over", "item")

    def __init__(self, item: T) -> None:
        self.item = item
        self.is_over = False
        self.error: BaseException | None = None  # raised by processing it


class InOrder(Generic[T]):
    """A queue of items for two threads.

    `wait(item)` returns when an item may be processed; both threads may wait for one item. `do(item)` is called once,
    after the items before it, by one thread at a time.

    An error of `do` is raised by `do_through` of that item alone; later items are still processed. An error of `wait`
    is raised to its caller, and the item stays in the queue.
    """

    def __init__(self, wait: Callable[[T], object], do: Callable[[T], object]) -> None:
        self._wait, self._do = wait, do
        self._turns: deque[OrderTicket[T]] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Items that wait, without the one that is being processed."""
        return len(self._turns)

    def append(self, item: T) -> OrderTicket[T]:
        """Adds an item at the end. Returns its handle, for `do_through`."""
        turn = OrderTicket(item)
        self._turns.append(turn)
        return turn

    def do_through(self, turn: OrderTicket[T]) -> None:
        """Processes items in order until `turn` is over.

        Raises the error of its item, whichever thread processed it.
        """
        self._do_until(lambda: turn.is_over)
        if turn.error is not None:
            raise turn.error

    def do_all(self) -> None:
        """Processes all items. Errors are kept for `do_through`."""
        self._do_until(lambda: False)

    def _do_until(self, is_enough: Callable[[], bool]) -> None:
        while True:
            with self._lock:
                if is_enough() or not self._turns:
                    return
                turn = self._turns[0]
            self._wait(turn.item)
            with self._lock:
                if self._turns and self._turns[0] is turn:
                    self._turns.popleft()
                    self._finish(turn)

    def _finish(self, turn: OrderTicket[T]) -> None:
        try:
            self._do(turn.item)
        except BaseException as error:
            turn.error = error
        turn.is_over = True
