"""When to plan a step while another is under way. Plain code behind the schedule stage; reads no clock.

A step runs those who were known when it was planned. One that is planned as soon as it may be lies ready for as long as
the step before it runs, and who comes in that time waits for both. So where somebody may well come, it is planned as
late as it can be for the device to find it ready: who comes while a step runs is in the next one, not in the one after.

To wait is not free. The loop wakes once more while threads compute, half a millisecond of a step of 32 rows on two
cores, and a plan that comes too late costs 1.5. Hence it is done where steps are long, as those that compute prompts
are, and for a moment after an answer has ended: a client that keeps so many requests in flight sends the next one then.
"""

from __future__ import annotations

from .scheduler import Scheduler

LEAD_S = (
    0.005  # before the device is expected to be free; to plan and to grant takes one or two, once the loop gets to it
)
LEAD_SHARE = (
    0.2  # of what the steps under way take, if that is more: one in ten takes less than 0.8 of what is expected
)
LONG_S = 0.03  # that steps under way take: it is worth waiting while they run
SHORT_S = 0.01  # that they take: while these run it is not, whatever has happened
RETURN_S = 0.02  # after the end of an answer, in which its client may send another request; 4 to 9 ms were seen


class Lead:
    """Follows when the device began with the steps under way, and when an answer last ended."""

    def __init__(self) -> None:
        self.due_s = 0.0  # when the next step is to be planned, if `holds` says that it is not time yet
        self._began_s = 0.0
        self._last_end_s = float("-inf")

    def note_begun(self, now_s: float) -> None:
        """The device is done with a step and has gone on to the next, or gets one where it had none."""
        self._began_s = now_s

    def note_end(self, now_s: float) -> None:
        """An answer has ended."""
        self._last_end_s = now_s

    def holds(self, scheduler: Scheduler, now_s: float) -> bool:
        """Whether it is too early to plan a step: the device has enough to do until `due_s`."""
        if not scheduler.has_credit:
            return False
        expected_s = scheduler.expected_s
        if expected_s < (SHORT_S if now_s < self._last_end_s + RETURN_S else LONG_S):
            return False
        self.due_s = self._began_s + expected_s - max(LEAD_S, LEAD_SHARE * expected_s)
        return now_s < self.due_s
