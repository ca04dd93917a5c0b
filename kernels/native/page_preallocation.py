"""Memory that is taken from the system before it is used, while nothing is computed.

Knows places in memory and when somebody computes. Refuses to know blocks and what is in them.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

from .shape import Array

LARGE_PAGE = 2 << 20  # bytes
NO_LIMIT = 1 << 62  # bytes
_SMALL_PAGE = 4 << 10
_POPULATE_WRITE = 23  # of madvise, in Linux since 5.14: pages are there as if written to, and keep what they hold
IDLE_S = 0.25  # without a step, until pages are taken; the least time between two looks at that
LEFT_BYTES = 512 << 20  # of what the system has, to whoever else wants memory
LOOK_BYTES = 2 * LARGE_PAGE  # of a region: after so many more are used, at most, it is seen to that enough is taken
NUM_TAKERS = 2  # threads; where a page takes 4.7 ms, two take one in 2.5 ms (a virtual machine of two cores)


def take_pages(address: int, num_bytes: int) -> bool:
    """Has the system hand out the pages from `address` on, both multiples of 4 KiB, without a change to what they hold
    and without the interpreter lock. False where it does not know how, or has none."""
    try:
        madvise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError):  # no such call: not Linux
        return False
    return bool(madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _POPULATE_WRITE) == 0)


class TakenAhead:
    """Keeps `ahead_bytes` of each region taken past what was used of it, from its beginning on.

    The system hands out memory when it is first written to, in large pages that it clears: 0.2 ms for each, and 5 in a
    virtual machine whose host takes back what is free. Steps of prompts would wait for that, a tenth of their time.
    Here threads of their own take pages one by one, none within `IDLE_S` of a step, and end when there are enough. They
    leave `left_bytes` of what the system has, to whoever else wants memory: then they end, and look again when more is
    used.

    All but `join` may be called on the thread that runs the steps; of 30 regions each takes a microsecond.
    """

    def __init__(
        self,
        regions: Array,  # [R, ...], each region in one piece
        ahead_bytes: int,  # 0: nothing is ever taken
        *,
        left_bytes: int = LEFT_BYTES,
        num_takers: int = NUM_TAKERS,
        take: Callable[[int, int], bool] = take_pages,
        room: Callable[[], int] = lambda: NO_LIMIT,  # bytes that the system still has for us
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_taken = 0  # bytes, by now
        self._regions = regions  # not given back while something is being taken
        self._begins = [regions.ctypes.data + place * regions.strides[0] for place in range(len(regions))]
        self._ends = [begin + regions[0].nbytes for begin in self._begins]
        self._next = [begin // _SMALL_PAGE * _SMALL_PAGE for begin in self._begins]  # the page that is taken next
        self._ahead_bytes = ahead_bytes
        self._left_bytes = left_bytes
        self._num_takers = num_takers
        self._take = take
        self._room = room
        self._now = now
        self._used_bytes = 0
        self._looked_at_bytes = 0  # used when it was last seen to that enough is taken
        self._is_in_step = False
        self._last_step_s = now()
        self._lock = threading.Lock()
        self._takers: list[threading.Thread] = []  # that have not found out yet that there are enough
        self._is_over = threading.Event()

    def note_used(self, num_bytes: int) -> None:
        """So many bytes of each region are used, from its beginning on, or are about to be."""
        self._used_bytes = max(self._used_bytes, num_bytes)
        if self._used_bytes - self._looked_at_bytes > min(LOOK_BYTES, self._ahead_bytes // 8):
            self.start()

    def start(self) -> None:
        """Begins to take what is lacking."""
        self._looked_at_bytes = self._used_bytes
        with self._lock:
            if not self._ahead_bytes or self._is_over.is_set() or self._lacking() is None:
                return
            while len(self._takers) < self._num_takers:
                taker = threading.Thread(target=self._run, name="memory-ahead", daemon=True)
                taker.start()
                self._takers.append(taker)  # before it can look, as that needs the lock

    def begin_step(self) -> None:
        self._is_in_step = True

    def end_step(self) -> None:
        self._last_step_s = self._now()
        self._is_in_step = False

    def stop(self) -> None:
        """Takes nothing more, from the next page on: for who is about to give the memory back."""
        self._is_over.set()

    def join(self) -> None:
        """Returns when nothing is being taken."""
        for taker in list(self._takers):
            taker.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            wait_s = IDLE_S if self._is_in_step else self._last_step_s + IDLE_S - self._now()
            has_room = wait_s > 0 or self._has_room()  # which reads files: who runs the steps may want the lock
            with self._lock:
                region = self._lacking()
                if region is None or not has_room:  # until more is used
                    self._takers.remove(threading.current_thread())
                    return
                begin, end = self._next[region], self._end_of_page(region)
                if wait_s <= 0:
                    self._next[region] = end
            if wait_s > 0:
                self._is_over.wait(wait_s)
            elif self._take(begin, end - begin):
                with self._lock:
                    self.num_taken += end - begin
            else:
                self._is_over.set()

    def _has_room(self) -> bool:
        return self._room() >= self._left_bytes

    def _end_of_page(self, region: int) -> int:
        """Of the one that is taken next in this region, whose last page may be no large one."""
        end_of_region: int = -(-self._ends[region] // _SMALL_PAGE) * _SMALL_PAGE
        return min((self._next[region] // LARGE_PAGE + 1) * LARGE_PAGE, end_of_region)

    def _lacking(self) -> int | None:
        """The region that will be the first to need a page that was not taken; None if all have enough."""
        wanted = self._used_bytes + self._ahead_bytes
        left = [
            (page - begin, region)
            for region, (page, begin, end) in enumerate(zip(self._next, self._begins, self._ends, strict=True))
            if page < min(begin + wanted, end)
        ]
        return min(left)[1] if left else None
