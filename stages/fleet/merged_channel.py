"""The channel in which the steps of all engine processes arrive, in one order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...runtime.channel import Channel
from ...runtime.processes.link_channels import InboundChannel
from ..messages import StepTokens


class CoreTokens(NamedTuple):
    """A step of one engine process."""

    core: int  # index
    tokens: StepTokens

    @property
    def step(self) -> int:
        return self.tokens.step

    @property
    def sequence_ids(self) -> Any:
        return self.tokens.sequence_ids

    @property
    def pooled(self) -> Any:
        return self.tokens.pooled


class MergedChannel(Channel[CoreTokens]):
    """Queues what arrives at all its ends, in the order of arrival.

    Requests of a lost process are sent to another one only after all that came from the first was queued here. So what
    the second sends about them is behind it. Each end returns credits for its own items, once they are received.
    """

    def __init__(self, name: str, capacity: int, clock: Callable[[], float]) -> None:
        super().__init__(name, capacity, clock)
        self._ends: list[CoreEnd] = []

    def add_end(
        self,
        core: int,
        name: str,
        capacity: int,
        clock: Callable[[], float],
        on_arrival: Callable[[StepTokens], object],
    ) -> CoreEnd:
        """The end for the link of one engine process."""
        end = CoreEnd(self, core, name, capacity, clock, on_arrival)
        self._ends.append(end)
        return end

    def recv_all(self, now: float | None = None) -> list[CoreTokens]:
        items = super().recv_all(now)
        if items:
            for end in self._ends:
                end.pay()
        return items


class CoreEnd(InboundChannel[StepTokens]):
    """Where the steps of one engine process arrive. It hands them on at once, and holds none."""

    def __init__(
        self,
        merged: MergedChannel,
        core: int,
        name: str,
        capacity: int,
        clock: Callable[[], float],
        on_arrival: Callable[[StepTokens], object],
    ) -> None:
        super().__init__(name, capacity, clock, on_arrival)
        self._merged, self._core = merged, core

    def pay(self) -> None:
        """All that came was received: returns credits for it."""
        if self._num_owned and self._link is not None:
            self.num_owed += self._num_owned
            self._num_owned = 0
            self._link.wake()

    def _put(self, item: StepTokens, now: Any = None) -> None:
        if not self._merged.is_closed:
            self._merged._put(CoreTokens(self._core, item), now)
