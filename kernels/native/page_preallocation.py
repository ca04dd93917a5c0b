"""Preallocation of memory pages between steps, before the cache first uses them."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

from .shape import Array

LARGE_PAGE = 2 << 20  # bytes
NO_LIMIT = 1 << 62  # bytes
_SMALL_PAGE = 4 << 10
_POPULATE_WRITE = 23  # madvise, Linux 5.14 or newer: populates pages as if written to; contents stay
IDLE_S = 0.25  # without a step before pages are taken; also the shortest wait between checks
LEFT_BYTES = 512 << 20  # of the system's memory, left to other processes
CHECK_INTERVAL_BYTES = 2 * LARGE_PAGE  # of a region: check again after at most this many more are used
NUM_TAKERS = 2  # threads; where a page takes 4.7 ms, two take one in 2.5 ms (a virtual machine of two cores)


def take_pages(address: int, num_bytes: int) -> bool:
    """Populates the pages from `address` on; both arguments are multiples of 4 KiB.

    Contents stay as they are; the interpreter lock is released. False if the system lacks the call or the memory.
    """
    try:
        madvise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError):  # no such call: not Linux
        return False
    return bool(madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _POPULATE_WRITE) == 0)


class PagePreallocation:
    """Keeps `ahead_bytes` of each region populated past its used part, which begins at its start.

    The system hands out memory at the first write, in large pages that it clears: 0.2 ms per page, and 5 ms in a
    virtual machine whose host takes back free memory. Prompt steps would spend a tenth of their time on that. Here
    separate threads populate pages one by one, none within `IDLE_S` of a step, and end when there are enough. They also
    end when less than `left_bytes` of the system's memory are left, and start again when more is used.

    All methods but `join` may be called on the thread that runs the steps; with 30 regions each takes a microsecond.
    """

    def __init__(
        self,
        regions: Array,  # [R, ...], each region in one piece
        ahead_bytes: int,  # 0: never preallocates
        *,
        left_bytes: int = LEFT_BYTES,
        num_takers: int = NUM_TAKERS,
        take: Callable[[int, int], bool] = take_pages,
        available_bytes: Callable[[], int] = lambda: NO_LIMIT,  # bytes that the system has left
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_taken = 0  # bytes so far
        self._regions = regions  # keeps the memory alive while pages are populated
        self._begins = [regions.ctypes.data + place * regions.strides[0] for place in range(len(regions))]
        self._ends = [begin + regions[0].nbytes for begin in self._begins]
        self._next = [begin // _SMALL_PAGE * _SMALL_PAGE for begin in self._begins]  # the next page to populate
        self._ahead_bytes = ahead_bytes
        self._left_bytes = left_bytes
        self._num_takers = num_takers
        self._take = take
        self._available_bytes = available_bytes
        self._now = now
        self._used_bytes = 0
        self._checked_bytes = 0  # `_used_bytes` at the last check
        self._is_in_step = False
        self._last_step_s = now()
        self._lock = threading.Lock()
        self._takers: list[threading.Thread] = []  # running threads
        self._is_over = threading.Event()

    def note_used(self, num_bytes: int) -> None:
        """Notes that the first `num_bytes` of each region are used, or about to be."""
        self._used_bytes = max(self._used_bytes, num_bytes)
        if self._used_bytes - self._checked_bytes > min(CHECK_INTERVAL_BYTES, self._ahead_bytes // 8):
            self.start()

    def start(self) -> None:
        """Starts to populate missing pages."""
        self._checked_bytes = self._used_bytes
        with self._lock:
            if not self._ahead_bytes or self._is_over.is_set() or self._lacking() is None:
                return
            while len(self._takers) < self._num_takers:
                taker = threading.Thread(target=self._run, name="memory-ahead", daemon=True)
                try:
                    taker.start()
                except RuntimeError:  # no further thread: pages come at their first use, or at a later try
                    return
                self._takers.append(taker)  # before the thread can check, which needs the lock

    def begin_step(self) -> None:
        self._is_in_step = True

    def end_step(self) -> None:
        self._last_step_s = self._now()
        self._is_in_step = False

    def stop(self) -> None:
        """Stops after the current page. Call before the memory is released."""
        self._is_over.set()

    def join(self) -> None:
        """Waits until no thread populates pages."""
        for taker in list(self._takers):
            taker.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            wait_s = IDLE_S if self._is_in_step else self._last_step_s + IDLE_S - self._now()
            has_memory = wait_s > 0 or self._has_memory()  # reads files, so not under the lock
            with self._lock:
                region = self._lacking()
                if region is None or not has_memory:  # ends until more is used
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

    def _has_memory(self) -> bool:
        return self._available_bytes() >= self._left_bytes

    def _end_of_page(self, region: int) -> int:
        """End of the next page of a region; the last page may be a partial one."""
        end_of_region: int = -(-self._ends[region] // _SMALL_PAGE) * _SMALL_PAGE
        return min((self._next[region] // LARGE_PAGE + 1) * LARGE_PAGE, end_of_region)

    def _lacking(self) -> int | None:
        """The region that will first need a missing page; None if all have enough."""
        wanted = self._used_bytes + self._ahead_bytes
        left = [
            (page - begin, region)
            for region, (page, begin, end) in enumerate(zip(self._next, self._begins, self._ends, strict=True))
            if page < min(begin + wanted, end)
        ]
        return min(left)[1] if left else None
