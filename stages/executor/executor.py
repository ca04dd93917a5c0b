"""The executor: starts and ends ranks. What they are told goes over an `OrderLine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ...runtime.processes.order_line import Member

if TYPE_CHECKING:
    from ...model.sharding.comm import Comm  # which imports torch


@dataclass(frozen=True, slots=True, eq=False)
class StartedRanks:
    """Ranks 1 to size - 1, which wait for their first order."""

    members: Sequence[Member]
    join: Callable[[Any], Comm]  # rank 0's end, on its torch.device; waits until all ranks join
    folder: str  # where processes find each other; empty for threads
    abort: Callable[[], object]  # makes a call of `Comm` in progress fail
    unlink: Callable[[], object]  # removes that folder, once all have found each other
    close: Callable[[], object]  # frees what the ranks used; call after they have ended


class Executor(Protocol):
    """Starts ranks in one way: as threads, as processes."""

    def start_ranks(self, size: int) -> StartedRanks:
        """Starts the ranks beside rank 0, `size` with it. Raises OSError and `ThreadNotStarted`."""
