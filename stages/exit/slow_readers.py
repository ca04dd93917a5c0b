"""Parking of answers whose client does not read: schedule does not serve them."""

from __future__ import annotations

from collections.abc import Callable

from ...runtime.env.awake_time import AwakeTimer
from .request_outbox import AnswerBuffer, RequestOutbox


class SlowReaders:
    """Parks choices, and unparks all choices of a request at its next read.

    `post` sends "park" or "unpark" for a sequence to schedule. `end` ends a request that has had a parked choice for
    `stall_s`, in which this process ran.
    """

    def __init__(self, stall_s: float, post: Callable[[int, str], object], end: Callable[[str, str], object]) -> None:
        self._stall_s = stall_s
        self._post = post
        self._end = end
        self._timers: dict[str, AwakeTimer] = {}  # by request id: those with a parked choice

    def park(self, choice: AnswerBuffer) -> None:
        """Parks a choice whose reader is too far behind."""
        choice.is_parked = True
        self._post(choice.sequence_id, "park")
        outbox = choice.outbox
        if outbox.request_id not in self._timers:
            self._timers[outbox.request_id] = AwakeTimer(self._stall_s, self._end, outbox.request_id, "stalled_reader")
            outbox.on_read = self._unpark

    def _unpark(self, outbox: RequestOutbox) -> None:
        self.forget(outbox)
        for choice in outbox.choices:
            if choice.is_parked:
                choice.is_parked = False
                if choice.finish is None:
                    self._post(choice.sequence_id, "unpark")

    def forget(self, outbox: RequestOutbox) -> None:
        """Stops the timer of a request: its client reads again, or the request has ended."""
        timer = self._timers.pop(outbox.request_id, None)
        if timer is not None:
            timer.cancel()
            outbox.on_read = None
