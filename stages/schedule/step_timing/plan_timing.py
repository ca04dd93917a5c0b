"""When to plan the next step while one runs.

Plain code behind the schedule stage; reads no clock. A step runs only the sequences known when it was planned. If it is
planned as soon as a credit is free, a request that arrives during the running step waits for both steps. So where a
request is likely to arrive, planning is delayed until just before the device needs the plan; such a request is then in
the next step.

Delaying has a cost: the event loop wakes once more while threads compute, and a plan that comes too late idles the
device for about 1.5 ms. So it is done only during long steps, such as those that compute prompts, and for a moment
after an answer has ended, when a closed-loop client sends its next request. The lead time adapts to its success.
"""

from __future__ import annotations

LEAST_S = 0.005  # lead time before the running step's expected end; planning and granting take 1 to 2 ms
LEAST_SHARE, FIRST_SHARE, MOST_SHARE = 0.05, 0.2, 0.8  # lead time as a share of that step, if longer
LATE_GROWS, TIMELY_SHRINKS = 1.3, 0.985  # factors of that share; balanced when 1 in 18 plans is late
LONG_STEP_S = 0.03  # delay planning during steps of at least this duration
SHORT_STEP_S = 0.01  # never delay during steps shorter than this
RETURN_S = 0.02  # after an answer ends, its client may send another request; measured 4 to 9 ms
CLOCK_S = 0.001  # by which a timer may fire early


class PlanTimer:
    """Tracks the start of the running step, the last end of an answer, and the lead time."""

    def __init__(self) -> None:
        self.due_s = 0.0  # when to plan the next step; valid after `is_early` returned True
        self.share = FIRST_SHARE
        self._began_s = 0.0
        self._last_end_s = float("-inf")

    def note_started(self, now_s: float) -> None:
        """Records that the device began a step: after the previous one, or after it was idle."""
        self._began_s = now_s

    def note_end(self, now_s: float) -> None:
        """Records that an answer ended on the device, by its length or by an end token."""
        self._last_end_s = now_s

    def note_waited(self, *, is_late: bool) -> None:
        """Adapts the lead time after a delayed plan.

        `is_late`: the device was idle, as the plan was not ready.
        """
        share = self.share * (LATE_GROWS if is_late else TIMELY_SHRINKS)
        self.share = min(max(LEAST_SHARE, share), MOST_SHARE)

    def is_early(self, expected_s: float, now_s: float) -> bool:
        """Whether to delay planning until `due_s`, if the running step takes `expected_s`."""
        if expected_s < (SHORT_STEP_S if now_s < self._last_end_s + RETURN_S else LONG_STEP_S):
            return False
        self.due_s = self._began_s + expected_s - max(LEAST_S, self.share * expected_s)
        return now_s < self.due_s - CLOCK_S
