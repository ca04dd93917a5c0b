"""`RequestHold`: whether a front that has lost all its engines still takes requests, which wait for one."""

from __future__ import annotations

from collections.abc import Callable

from ...runtime.env.awake_time import AwakeTimer

HOLD_S = 10.0  # from the loss of the last engine: a connection that was cut is there again by then


class RequestHold:
    """On for `hold_s` from the loss of the last engine; later requests are refused.

    It begins only after an engine has served since the last one. `on_end` is called when it ends without an engine.
    Time in which the machine stood still does not count. Belongs to one loop; `is_on` may be read in any thread.
    """

    def __init__(self, on_end: Callable[[], object], hold_s: float = HOLD_S) -> None:
        self.is_on = False
        self._on_end, self._hold_s = on_end, hold_s
        self._has_served = False  # since the last hold
        self._timer: AwakeTimer | None = None  # while it is on

    def note_serving(self) -> None:
        """An engine takes requests."""
        self.close()
        self._has_served = True

    def note_lost(self) -> None:
        """No engine is there any more, but one may be soon. Without effect if that is known."""
        if self._has_served:
            self._has_served, self.is_on = False, True
            self._timer = AwakeTimer(self._hold_s, self.end)

    def end(self) -> None:
        """No engine is there, and none is there soon. Idempotent."""
        was_on = self.is_on
        self.close()
        if was_on:
            self._on_end()

    def close(self) -> None:
        """Ends it without a call. Idempotent."""
        self._has_served = self.is_on = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
