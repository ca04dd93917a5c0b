"""Answers that nobody reads: schedule does not serve them until their client reads again, or has had its time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .request_outbox import Choice, RequestOutbox


class Parking:
    """Parks choices, and unparks all of a request's at its next read. `post` tells schedule so, of a sequence; `end`
    ends a request that has had a choice parked for `stall_s`."""

    def __init__(self, stall_s: float, post: Callable[[int, str], object], end: Callable[[str, str], object]) -> None:
        self._stall_s = stall_s
        self._post = post
        self._end = end
        self._timers: dict[str, asyncio.TimerHandle] = {}  # by request id: those with a parked choice

    def park(self, choice: Choice) -> None:
        """Its reader is too far behind."""
        choice.is_parked = True
        self._post(choice.sequence_id, "park")
        outbox = choice.outbox
        if outbox.request_id not in self._timers:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(self._stall_s, self._end, outbox.request_id, "stalled_reader")
            self._timers[outbox.request_id] = timer
            outbox.on_read = self._unpark

    def _unpark(self, outbox: RequestOutbox) -> None:
        self.forget(outbox)
        for choice in outbox.choices:
            if choice.is_parked:
                choice.is_parked = False
                if choice.finish is None:
                    self._post(choice.sequence_id, "unpark")

    def forget(self, outbox: RequestOutbox) -> None:
        """The reader reads, or need not any more."""
        timer = self._timers.pop(outbox.request_id, None)
        if timer is not None:
            timer.cancel()
            outbox.on_read = None
