"""Thread throttle: decides how many threads compute while other processes use the cores.

The threads of a step wait for each other at a hundred places. If another process has one thread's core half of the
time, all threads stop for that half, each time for as long as the system lets the other process run. A step then takes
two to five times as long; with one thread less it would take a little longer and leave the core to the other process.

So when threads lose that much time, as many are left out as cores are lost. The others may run on any of the cores,
because the other process may be pinned to one of them. Later the threads that are left out probe whether the cores are
free: once the system reports that other processes have used them less for a while, and at long intervals in any case.
Both intervals are wall time, idle time included, because the other process may end while the engine is idle. A probe
may slow a step down, so after a failed one some steps must pass as well.

Plain code: takes the library's sums and clocks as arguments, and has no thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Longs = NDArray[np.int64]

WINDOW_NS = 40_000_000  # of step time per decision
LOST = 0.25  # cores lost in two consecutive windows from which on threads are left out
FREE = 0.1  # share of a probe's time lost; below it the cores are free
TRY_NS = 10_000_000  # of probing per decision
WANTED = 0.7  # of a core used by others per thread left out; above it a probe would fail
# Wall time between checks of the cores' use, or between probes if it is unknown; doubles after each failed probe.
# The second is the longest time without a probe.
FIRST_PAUSE_NS, LONGEST_PAUSE_NS = 500_000_000, 4_000_000_000
HOLD_NS = 5_000_000_000  # of step time with all threads, after leaving threads out did not help
TIRED_NS = 500_000_000  # of step time after a failed probe: one step in fifty probes if steps take 10 ms


class ThreadShare(IntEnum):
    """Indices of the library's time sums: `ThreadTime` of source/machine/threads.h."""

    PASSED = 0
    USED = 1
    LOST = 2
    TRIED = 3
    LOST_TRYING = 4


PASSED = int(ThreadShare.PASSED)


class ThreadThrottle:
    """Decides the number of threads of the next step (`limit`), and whether the others probe (`is_trying`).

    Call `note` with the library's sums after each step.
    """

    def __init__(
        self,
        num_threads: int,
        on_change: Callable[[int, float], None] = lambda limit, num_lost: None,
        process_ns: Callable[[], int] = time.process_time_ns,
        idle_ns: Callable[[], tuple[int, int] | None] = lambda: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`on_change`: called with a new limit and the number of cores lost. `process_ns`: CPU time of this process.

        `idle_ns`: idle time and elapsed time of the threads' cores, both added up over the cores; None: unknown.
        `clock_ns`: a monotonic clock.
        """
        self.limit = self.num_threads = num_threads
        self.is_trying = False
        self.num_lost = 0.0  # cores, in the last window
        self._on_change, self._process_ns, self._idle_ns, self._clock_ns = on_change, process_ns, idle_ns, clock_ns
        self._last_sample: tuple[int, int, int] | None = None  # at the last check: `idle_ns` and `process_ns`
        self._began = [0] * len(ThreadShare)  # sums at the start of the window
        self._began_process_ns = process_ns()
        self._num_bad = 0  # consecutive windows in which too much was lost
        self._pause_ns = FIRST_PAUSE_NS
        self._held_until_ns = 0  # step time before which no thread is left out
        self._tired_until_ns = 0  # step time before which no thread probes
        self._next_try_ns = 0  # wall time
        self._last_try_ns = 0  # wall time of the last probe or the last reduction

    def note(self, shares: Longs) -> bool:
        """`shares` [5]: sums since the start, ns, indexed by `ThreadShare`. True if `limit` or `is_trying` changed."""
        if not self.is_trying and shares.item(PASSED) - self._began[PASSED] < WINDOW_NS:
            return False  # as after most steps
        before = self.limit, self.is_trying
        if self.is_trying:
            self._judge_try(shares)
        else:
            self._judge(shares)
        if self.limit != before[0]:
            self._on_change(self.limit, self.num_lost)
        return (self.limit, self.is_trying) != before

    def _judge(self, shares: Longs) -> None:
        passed_ns, used_ns, lost_ns = (
            self._since(shares, each) for each in (ThreadShare.PASSED, ThreadShare.USED, ThreadShare.LOST)
        )
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
        """Whether other processes used the cores little enough since the last check, or their use is unknown.

        Neither this process's own time nor the cores' idle time counts as theirs.
        """
        before, now = self._last_sample, self._take_sample()
        if before is None or now is None:
            return True
        idle, passed, own = (after - then for after, then in zip(now, before, strict=True))
        num_had = (passed - idle - own) * self.num_threads / max(1, passed)
        return num_had <= WANTED * (self.num_threads - self.limit)

    def _take_sample(self) -> tuple[int, int, int] | None:
        idle_ns = self._idle_ns()
        self._last_sample = None if idle_ns is None else (*idle_ns, self._process_ns())
        return self._last_sample

    def _since(self, shares: Longs, share: ThreadShare) -> int:
        """The sum within this window."""
        return shares.item(share) - self._began[share]

    def _to_others(self, lost_ns: int, used_ns: int) -> int:
        """Time lost to other processes: excludes the time of this process's other threads."""
        own_ns = self._process_ns() - self._began_process_ns - used_ns
        return max(0, lost_ns - max(0, own_ns))

    def _leave(self, passed_ns: int) -> None:
        least = max(1, self.num_threads // 2)
        if self.limit == self.num_threads and passed_ns < self._held_until_ns:
            return
        if self.limit == least:  # it did not help: other processes use these cores, too
            self.limit, self._held_until_ns = self.num_threads, passed_ns + HOLD_NS
            return
        self.limit = max(least, self.limit - max(1, round(self.num_lost)))
        self._take_sample()
        self._last_try_ns = self._clock_ns()
        self._pause(FIRST_PAUSE_NS)

    def _pause(self, pause_ns: int) -> None:
        self._pause_ns, self._next_try_ns = pause_ns, self._clock_ns() + pause_ns

    def _judge_try(self, shares: Longs) -> None:
        tried_ns, lost_ns = self._since(shares, ThreadShare.TRIED), self._since(shares, ThreadShare.LOST_TRYING)
        if tried_ns < TRY_NS:
            return
        lost_ns = self._to_others(lost_ns, self._since(shares, ThreadShare.USED) + tried_ns - lost_ns)
        self._begin(shares)
        self.is_trying = False
        if lost_ns < FREE * tried_ns:
            self.limit = self.num_threads
        else:
            self._last_try_ns, self._tired_until_ns = self._clock_ns(), shares.item(PASSED) + TIRED_NS
            self._pause(min(2 * self._pause_ns, LONGEST_PAUSE_NS))

    def _begin(self, shares: Longs) -> None:
        """Starts a new window."""
        self._began = shares.tolist()
        self._began_process_ns = self._process_ns()
