"""Ranks as threads of this process, for tests and debugging: they share the interpreter, so they are no faster."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ...runtime.workers.thread_start import start_thread
from .executor import StartedRanks

if TYPE_CHECKING:
    from ...model.sharding.comm import Comm  # which imports torch
    from ...model.sharding.thread_comm import ThreadGroup

Run = Callable[[socket.socket, "Callable[[Any], Comm]"], object]  # obeys the orders of a socket to their end


class RankThread:
    """One rank: a `Member` of an order line."""

    def __init__(self, rank: int, run: Run, join: Callable[[Any], Comm]) -> None:
        self.name = f"rank {rank}"
        self.sock, self._theirs = socket.socketpair()
        self._run, self._join = run, join
        self.thread = threading.Thread(target=self._live, name=f"millrace-rank-{rank}", daemon=True)
        start_thread(self.thread)

    def kill(self) -> None:
        """Ends its orders; a thread cannot be stopped within one."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def end_cause(self) -> str | None:
        return None if self.thread.is_alive() else "its thread has ended"

    def _live(self) -> None:
        with self._theirs:
            self._run(self._theirs, self._join)


class ThreadExecutor:
    """See `Executor`. `run` is a rank's thread."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def start_ranks(self, size: int) -> StartedRanks:
        from ...model.sharding.thread_comm import ThreadGroup

        group = ThreadGroup(size)
        ranks = [RankThread(rank, self._run, partial(_end_of, group, rank)) for rank in range(1, size)]

        def close() -> None:
            for rank in ranks:
                rank.thread.join()

        return StartedRanks(ranks, partial(_end_of, group, 0), "", group.end, lambda: None, close)


def _end_of(group: ThreadGroup, rank: int, device: object) -> Comm:
    return group.comm(rank)
