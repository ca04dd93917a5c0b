"""How many threads compute where others want the cores, too.

A step has a hundred places where its threads wait for each other. So a thread whose core somebody else has half of the
time stops all of them that half, and each time for as long as the system lets the other one run: a step takes two to
five times as long, where one thread less would take a little longer and leave the core to who wants it. Hence: where
threads lose so much of their time, as many are left out as there are cores lost. Those that go on may run on any of
their cores then, as whoever came may be pinned to one of them. Once others have had less of these for a while, as the
system tells, those left out try whether they have them to themselves; and now and then, whatever it tells. Both go by
the clock, rests included, as who was there before a rest may be gone after it. But a try may cost a step, so after one
in vain steps come first, too.

Plain code that is told what the library has added up, and what time it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Longs = NDArray[np.int64]

WINDOW_NS = 40_000_000  # of steps, that are judged together
LOST = 0.25  # cores lost to others in two such windows on end, from which on it is better to leave them
FREE = 0.1  # of the time of who tries, lost: less is nobody
TRY_NS = 10_000_000
WANTED = 0.7  # of a core that others had, for each thread that is left out: with more a try would be in vain
# By the clock between looks at what others had, or tries where nobody knows: after each try in vain twice as long. And
# the longest that nobody tries, whatever is known.
FIRST_PAUSE_NS, LONGEST_PAUSE_NS = 500_000_000, 4_000_000_000
HOLD_NS = 5_000_000_000  # of steps, as they are what is lost meanwhile: after it did not help
TIRED_NS = 500_000_000  # of steps, after a try in vain: one in fifty tries where they take 10 ms


class Share(IntEnum):
    """As in source/machine/threads.h."""

    PASSED = 0
    USED = 1
    LOST = 2
    TRIED = 3
    LOST_TRYING = 4


PASSED = int(Share.PASSED)


class Neighbours:
    """Decides by `note`, which is told the sums after each step, how many threads the next one has: `limit`, and
    whether those left out try (`is_trying`)."""

    def __init__(
        self,
        num_threads: int,
        tell: Callable[[int, float], None] = lambda limit, num_lost: None,
        process_ns: Callable[[], int] = time.process_time_ns,
        idle_ns: Callable[[], tuple[int, int] | None] = lambda: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`tell` hears of a new limit, and how many cores others had. `process_ns`: what all threads of this process
        have computed. `idle_ns`: for how long the cores of all threads have been idle, and how long there were any that
        could be, both added up over them; None: nobody knows. `clock_ns`: of one that never goes back."""
        self.limit = self.num_threads = num_threads
        self.is_trying = False
        self.num_lost = 0.0  # cores, in the last window
        self._tell, self._process_ns, self._idle_ns, self._clock_ns = tell, process_ns, idle_ns, clock_ns
        self._looked: tuple[int, int, int] | None = None  # what the last look saw: both of `idle_ns`, and `process_ns`
        self._began = [0] * len(Share)  # sums where the window began
        self._began_process_ns = process_ns()
        self._num_bad = 0  # windows on end in which too much was lost
        self._pause_ns = FIRST_PAUSE_NS
        self._held_until_ns = 0  # sum of steps, before which nobody is left out
        self._tired_until_ns = 0  # the same, before which nobody tries
        self._next_try_ns = 0  # by the clock
        self._last_try_ns = 0  # the same, when somebody tried or was left out

    def note(self, shares: Longs) -> bool:
        """`shares` [5] ns, as `Share` says, since the start. True if something is to be different."""
        if not self.is_trying and shares.item(PASSED) - self._began[PASSED] < WINDOW_NS:
            return False  # as after most steps
        before = self.limit, self.is_trying
        if self.is_trying:
            self._judge_try(shares)
        else:
            self._judge(shares)
        if self.limit != before[0]:
            self._tell(self.limit, self.num_lost)
        return (self.limit, self.is_trying) != before

    def _judge(self, shares: Longs) -> None:
        passed_ns, used_ns, lost_ns = (self._since(shares, each) for each in (Share.PASSED, Share.USED, Share.LOST))
        self.num_lost = self._to_others(lost_ns, used_ns) / passed_ns
        self._begin(shares)
        self._num_bad = self._num_bad + 1 if self.num_lost >= LOST else 0
        if self._num_bad >= 2:
            self._num_bad = 0
            self._leave(shares.item(PASSED))
        elif not self._num_bad and self.limit < self.num_threads and shares.item(PASSED) >= self._tired_until_ns:
            self._try_if_due()

    def _try_if_due(self) -> None:
        now_ns = self._clock_ns()
        if now_ns < self._next_try_ns:
            return
        self.is_trying = self._may_be_free() or now_ns >= self._last_try_ns + LONGEST_PAUSE_NS
        if not self.is_trying:
            self._pause(FIRST_PAUSE_NS)

    def _may_be_free(self) -> bool:
        """Whether others had little enough of these cores since the last look, or nobody knows: what this process had
        is not theirs, nor what it left while it had nothing to do."""
        before, now = self._looked, self._look()
        if before is None or now is None:
            return True
        idle, passed, own = (after - then for after, then in zip(now, before, strict=True))
        num_had = (passed - idle - own) * self.num_threads / max(1, passed)
        return num_had <= WANTED * (self.num_threads - self.limit)

    def _look(self) -> tuple[int, int, int] | None:
        idle_ns = self._idle_ns()
        self._looked = None if idle_ns is None else (*idle_ns, self._process_ns())
        return self._looked

    def _since(self, shares: Longs, share: Share) -> int:
        """In this window."""
        return shares.item(share) - self._began[share]

    def _to_others(self, lost_ns: int, used_ns: int) -> int:
        """What was lost to other processes: what threads of this one did besides was not theirs."""
        own_ns = self._process_ns() - self._began_process_ns - used_ns
        return max(0, lost_ns - max(0, own_ns))

    def _leave(self, passed_ns: int) -> None:
        least = max(1, self.num_threads // 2)
        if self.limit == self.num_threads and passed_ns < self._held_until_ns:
            return
        if self.limit == least:  # it was of no use: others want these, too
            self.limit, self._held_until_ns = self.num_threads, passed_ns + HOLD_NS
            return
        self.limit = max(least, self.limit - max(1, round(self.num_lost)))
        self._look()
        self._last_try_ns = self._clock_ns()
        self._pause(FIRST_PAUSE_NS)

    def _pause(self, pause_ns: int) -> None:
        self._pause_ns, self._next_try_ns = pause_ns, self._clock_ns() + pause_ns

    def _judge_try(self, shares: Longs) -> None:
        tried_ns, lost_ns = self._since(shares, Share.TRIED), self._since(shares, Share.LOST_TRYING)
        if tried_ns < TRY_NS:
            return
        lost_ns = self._to_others(lost_ns, self._since(shares, Share.USED) + tried_ns - lost_ns)
        self._begin(shares)
        self.is_trying = False
        if lost_ns < FREE * tried_ns:
            self.limit = self.num_threads
        else:
            self._last_try_ns, self._tired_until_ns = self._clock_ns(), shares.item(PASSED) + TIRED_NS
            self._pause(min(2 * self._pause_ns, LONGEST_PAUSE_NS))

    def _begin(self, shares: Longs) -> None:
        """A new window."""
        self._began = shares.tolist()
        self._began_process_ns = self._process_ns()
