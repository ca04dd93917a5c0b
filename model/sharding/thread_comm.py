"""Ranks as threads of one process: a list that each thread writes its tensor to, between two barriers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from .comm import MOST_SENT, CommLog, CommLost, ordered_sum

T = TypeVar("T")


class ThreadGroup:
    """What the threads of `size` ranks share. `comm(rank)` is one rank's end."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._given: list[tuple[str, Tensor] | None] = [None] * size
        self._sent: dict[tuple[int, int], deque[Tensor]] = {}  # by source and destination: not received yet
        self._changed = threading.Condition()
        self._parts: dict[tuple[int, ...], ThreadGroup] = {}  # by their ranks

    def comm(self, rank: int) -> ThreadComm:
        """The end of a rank, for its thread."""
        return ThreadComm(self, rank)

    def end(self) -> None:
        """Makes every call of every rank raise `CommLost` from now on."""
        self._barrier.abort()
        with self._changed:
            parts = list(self._parts.values())
            self._changed.notify_all()
        for part in parts:
            part.end()

    def part(self, ranks: Sequence[int]) -> ThreadGroup:
        """The group of some ranks."""
        with self._changed:
            group = self._parts.setdefault(tuple(ranks), ThreadGroup(len(ranks)))
        if self._barrier.broken:
            group.end()
        return group

    def send(self, x: Tensor, source: int, to: int) -> None:
        """See `Comm`."""
        with self._changed:
            queue = self._sent.setdefault((source, to), deque())
            self._wait(lambda: len(queue) < MOST_SENT)
            queue.append(x)
            self._changed.notify_all()

    def receive(self, source: int, to: int) -> Tensor:
        """See `Comm`."""
        with self._changed:
            queue = self._sent.setdefault((source, to), deque())
            self._wait(lambda: len(queue) > 0)
            self._changed.notify_all()
            return queue.popleft()

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._barrier.broken or is_ready())
        if self._barrier.broken:
            raise CommLost("a rank has ended")

    def exchange(self, rank: int, call: str, x: Tensor, then: Callable[[Sequence[Tensor]], T]) -> T:
        """Waits for all ranks and returns `then` of their tensors, which stay as they are until it has returned.

        Raises `CommLost` if a rank is gone or calls something else.
        """
        self._given[rank] = (call, x)
        try:
            self._barrier.wait()
            given = [one for one in self._given if one is not None]
            if len({one for one, _ in given}) > 1:
                self.end()
                calls = ", ".join(f"rank {number}: {one}" for number, (one, _) in enumerate(given))
                raise CommLost(f"ranks parted: {calls}")
            result = then([tensor for _, tensor in given])
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise CommLost("a rank has ended") from None
        return result


class ThreadComm:
    """See `Comm`. Sums are made in the order of ranks."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank, self.size, self.log = rank, group.size, CommLog()
        self._group = group

    def sum(self, partial: Tensor) -> Tensor:
        return self._exchange("sum", partial, ordered_sum)

    def gather(self, x: Tensor) -> Sequence[Tensor] | None:
        return self._exchange("gather", x, lambda parts: None if self.rank else [part.clone() for part in parts])

    def broadcast(self, x: Tensor) -> Tensor:
        return self._exchange("broadcast", x, lambda parts: x.copy_(parts[0]) if self.rank else x)

    def send(self, x: Tensor, to: int) -> None:
        self._group.send(x, self.rank, to)

    def receive(self, x: Tensor, source: int) -> Tensor:
        return self._group.receive(source, self.rank)

    def part(self, ranks: Sequence[int]) -> ThreadComm:
        return self._group.part(ranks).comm(ranks.index(self.rank))

    def _exchange(self, call: str, x: Tensor, then: Callable[[Sequence[Tensor]], T]) -> T:
        self.log.note(call, x)
        return self._group.exchange(self.rank, self.log.last, x, then)
