"""When to plan a step while others are under way. Plain code behind the schedule stage; reads no clock.

A step runs those who were known when it was planned. One that is planned as soon as it may be lies ready for as long as
the step before it runs, and who comes in that time waits for both. So where somebody may well come, it is planned as
late as it can be for the device to find it ready: who comes while a step runs is in the next one, not in the one after.

To wait is not free. The loop wakes once more while threads compute, half a millisecond of a step of 32 rows on two
cores, and a plan that comes too late costs 1.5. Hence it is done where steps are long, as those that compute prompts
are, and for a moment after an answer has ended: a client that keeps so many requests in flight sends the next one then.
How early is early enough is found by trying.
"""

from __future__ import annotations

LEAST_S = 0.005  # before the device is expected to be free: to plan and grant takes 1 or 2, once the loop gets to it
FIRST_SHARE, MOST_SHARE = 0.2, 0.9  # of what steps under way are expected to take, that a plan is made before their end
LATE_GROWS, TIMELY_SHRINKS = 1.3, 0.985  # that share, each time: so that one in eighteen plans comes too late
LONG_STEPS_S = 0.03  # that steps under way take: it is worth waiting while they run
SHORT_STEPS_S = 0.01  # that they take: while these run it is not, whatever has happened
RETURN_S = 0.02  # after the end of an answer, in which its client may send another request; 4 to 9 ms were seen
CLOCK_S = 0.001  # that a timer may ring too early


class Lead:
    """Follows when the device began with the steps under way, when it last ended an answer, and how early plans have to
    be made."""

    def __init__(self) -> None:
        self.due_s = 0.0  # when the next step is to be planned, if `is_early` says that it is not time yet
        self.share = FIRST_SHARE
        self._began_s = 0.0
        self._last_end_s = float("-inf")

    def note_begun(self, now_s: float) -> None:
        """The device is done with a step and has gone on to the next, or gets one where it had none."""
        self._began_s = now_s

    def note_end(self, now_s: float) -> None:
        """The device has come to the end of an answer."""
        self._last_end_s = now_s

    def note_planned(self, *, is_late: bool) -> None:
        """A plan that waited was made, when it was due, or as the device had nothing left to do."""
        self.share = min(self.share * (LATE_GROWS if is_late else TIMELY_SHRINKS), MOST_SHARE)

    def is_early(self, expected_s: float, now_s: float) -> bool:
        """Whether the device has enough to do until `due_s`, with steps under way that take so long as a rule."""
        if expected_s < (SHORT_STEPS_S if now_s < self._last_end_s + RETURN_S else LONG_STEPS_S):
            return False
        self.due_s = self._began_s + expected_s - max(LEAST_S, self.share * expected_s)
        return now_s < self.due_s - CLOCK_S
