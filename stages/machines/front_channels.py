"""The channels of a step loop that serves several fronts: their prompts in one order, and each its part of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from ...runtime.channel import Channel
from ...runtime.processes.link_channels import InboundChannel, OutboundChannel
from ...runtime.processes.wire import WireError
from ..fleet.front_table import FrontTable
from ..messages import StepTokens, TokenRequest
from ..pipeline import ENTRY_CAPACITY, TEXT_CAPACITY, TO_DETOKENIZE, TO_SCHEDULE

MAX_KEPT_STEPS = 4096  # of a front that does not read; then its link ends


class FrontRequests(Channel[TokenRequest]):
    """Queues the prompts of all fronts, in the order of arrival, as the engine knows them.

    Each front returns credits for its own, so it has at most `ENTRY_CAPACITY` here.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__("->".join(TO_SCHEDULE), ENTRY_CAPACITY, clock)
        self._ends: set[FrontEnd] = set()

    def add_end(self, translate: Callable[[TokenRequest], TokenRequest]) -> FrontEnd:
        """The end for the link of one front. `translate` gets each prompt that arrives."""
        end = FrontEnd(self, translate, self._clock)
        self._ends.add(end)
        return end

    def drop_end(self, end: FrontEnd) -> None:
        """A front is gone. Its prompts stay: their requests have ended."""
        self._ends.discard(end)

    def recv_all(self, now: float | None = None) -> list[TokenRequest]:
        items = super().recv_all(now)
        if items:
            for end in self._ends:
                end.pay()
        return items


class FrontEnd(InboundChannel[TokenRequest]):
    """Where the prompts of one front arrive. It hands them on at once, and holds none."""

    def __init__(
        self, merged: FrontRequests, translate: Callable[[TokenRequest], TokenRequest], clock: Callable[[], float]
    ) -> None:
        super().__init__(merged.name, ENTRY_CAPACITY, clock)
        self._merged, self._translate = merged, translate

    def pay(self) -> None:
        """All that came was received: returns credits for it."""
        if self._num_owned and self._link is not None:
            self.num_owed += self._num_owned
            self._num_owned = 0
            self._link.wake()

    def _put(self, item: TokenRequest, now: Any = None) -> None:
        if not self._merged.is_closed:
            self._merged._put(self._translate(item), now)


class FrontSteps:
    """The steps of one front: over its link while it reads, and kept here while it does not. Never waits.

    `on_overrun` is called once, when `MAX_KEPT_STEPS` are kept and another one comes.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        on_refused: Callable[[StepTokens, WireError], object],
        on_overrun: Callable[[], object],
    ) -> None:
        self.channel: OutboundChannel[StepTokens] = OutboundChannel(
            "->".join(TO_DETOKENIZE), TEXT_CAPACITY, clock, on_refused=on_refused
        )
        self.channel.on_room = self._send_kept
        self._kept: deque[StepTokens] = deque()
        self._on_overrun = on_overrun
        self._is_over = False

    def __len__(self) -> int:
        """How many steps are kept."""
        return len(self._kept)

    def send(self, step: StepTokens) -> None:
        """Sends a step now or as soon as the front reads; drops it once the link is given up."""
        if self._is_over:
            return
        if not self._kept and self.channel.try_send(step):
            return
        if len(self._kept) == MAX_KEPT_STEPS:
            self.close()
            self._on_overrun()
            return
        self._kept.append(step)

    def close(self) -> None:
        """Drops what is kept, and all that comes. Idempotent."""
        self._is_over = True
        self._kept.clear()

    def _send_kept(self) -> None:
        while self._kept and self.channel.try_send(self._kept[0]):
            self._kept.popleft()


class FanOut(Channel[StepTokens]):
    """Hands each step to the fronts that have a part in it, at once: it queues nothing, and is never full."""

    def __init__(
        self, table: FrontTable, send: Callable[[int, StepTokens], object], clock: Callable[[], float]
    ) -> None:
        super().__init__("->".join(TO_DETOKENIZE), TEXT_CAPACITY, clock)
        self._table, self._send = table, send

    def _put(self, item: StepTokens, now: float | None = None) -> None:
        self._num_sent += 1
        for front, part in self._table.split(item):
            self._send(front, part)
