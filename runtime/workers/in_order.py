"""Things that are done once each, in their order, by whichever of two threads needs them first."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Turn(Generic[T]):
    """The place of one item in the order."""

    __slots__ = ("error", "is_over", "item")

    def __init__(self, item: T) -> None:
        self.item = item
        self.is_over = False
        self.error: BaseException | None = None  # that doing it raised


class InOrder(Generic[T]):
    """`wait(item)` returns when an item may be done; both threads may wait for one. `do(item)` is called once, when
    those before it are over, by one thread at a time.

    What `do` raises is raised by `do_through` of that item alone: its turn is over, and those behind it have theirs.
    What `wait` raises is raised to who called, and the item is still to be done.
    """

    def __init__(self, wait: Callable[[T], object], do: Callable[[T], object]) -> None:
        self._wait, self._do = wait, do
        self._turns: deque[Turn[T]] = deque()
        self._lock = threading.Lock()

    def append(self, item: T) -> Turn[T]:
        """Puts it behind the others; what is returned is what to ask for it by."""
        turn = Turn(item)
        self._turns.append(turn)
        return turn

    def do_through(self, turn: Turn[T]) -> None:
        """Does what is to be done, one by one, until this turn is over. Raises what doing its item raised, whichever
        thread did it."""
        self._do_until(lambda: turn.is_over)
        if turn.error is not None:
            raise turn.error

    def do_all(self) -> None:
        """Until nothing is left. What the items raise is for those who ask for them."""
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

    def _finish(self, turn: Turn[T]) -> None:
        try:
            self._do(turn.item)
        except BaseException as error:
            turn.error = error
        turn.is_over = True
