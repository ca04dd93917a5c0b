"""`RequestHold`: whether a front that has lost all its engines still takes requests, which wait for one."""

from __future__ import annotations

from ...runtime.env.awake_time import AwakeTimer

HOLD_S = 10.0  # from the loss of the last engine: a connection that was cut is there again by then


class RequestHold:
    """On for `hold_s` from the loss of the last engine; later requests are refused.

    Those that were taken go on waiting, within their own limits. Time in which the machine stood still does not count.
    Belongs to one loop.
    """

    def __init__(self, hold_s: float = HOLD_S) -> None:
        self.is_on = False
        self._hold_s = hold_s
        self._timer: AwakeTimer | None = None  # since the loss; None: an engine is there

    def note(self, *, is_away: bool) -> None:
        """Whether there is no engine now. Without effect if that is known."""
        if is_away and self._timer is None:
            self.is_on = True
            self._timer = AwakeTimer(self._hold_s, self._end)
        elif not is_away:
            self.close()

    def close(self) -> None:
        """Stops the timer. Idempotent."""
        self._end()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self.is_on = False
