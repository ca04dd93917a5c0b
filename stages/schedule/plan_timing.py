"""When to plan a step while another runs. Plain code behind the schedule stage; reads no clock.

A step runs those who were known when it was planned. One that is planned as soon as it may be lies ready for as long as
the step before it runs, and who comes in that time waits for both. So where somebody may well come, it is planned as
late as it can be for the device to find it ready: who comes while a step runs is in the next one, not in the one after.

To wait is not free. The loop wakes once more while threads compute, and where a plan comes too late the device waits
for 1.5 ms (135M parameters, 32 rows, two cores). Hence it is done where steps are long, as those that compute prompts
are, and for a moment after an answer has ended: a client that keeps so many requests in flight sends the next one then.
How early is early enough is found by trying.
"""

from __future__ import annotations

LEAST_S = 0.005  # before the step that runs is expected to end: to plan and grant takes 1 or 2 ms of them
LEAST_SHARE, FIRST_SHARE, MOST_SHARE = 0.05, 0.2, 0.8  # of what that step is expected to take, if this is more
LATE_GROWS, TIMELY_SHRINKS = 1.3, 0.985  # that share, each time: so that one in eighteen plans comes too late
LONG_STEP_S = 0.03  # that the step takes: it is worth waiting while it runs
SHORT_STEP_S = 0.01  # that it takes: while it runs it is not, whatever has happened
RETURN_S = 0.02  # after the end of an answer, in which its client may send another request; 4 to 9 ms were seen
CLOCK_S = 0.001  # that a timer may ring too early


class Lead:
    """Follows when the device began with the step that runs, when it last ended an answer, and how early plans have to
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
        """The device has come to the end of an answer, by its length or by a token that ends it."""
        self._last_end_s = now_s

    def note_waited(self, *, is_late: bool) -> None:
        """The device is done with a step beside which a plan waited, and has another, or none as the plan came late."""
        share = self.share * (LATE_GROWS if is_late else TIMELY_SHRINKS)
        self.share = min(max(LEAST_SHARE, share), MOST_SHARE)

    def is_early(self, expected_s: float, now_s: float) -> bool:
        """Whether the device has enough to do until `due_s`, with a step that takes so long as a rule."""
        if expected_s < (SHORT_STEP_S if now_s < self._last_end_s + RETURN_S else LONG_STEP_S):
            return False
        self.due_s = self._began_s + expected_s - max(LEAST_S, self.share * expected_s)
        return now_s < self.due_s - CLOCK_S
