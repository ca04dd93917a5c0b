"""Rules by which the number of engines follows the load: ours, and Kubernetes' own, which the chart sets up.

A rule sees what the metrics tell. Engines that start count as engines: what is wanted is reckoned from all work.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

MOST_BUSY = 0.8  # share of an engine's sequences that run, above which more engines do not come too early
WAITS_LESS = 0.5  # of the target: engines end only once so little work would wait with fewer of them
ROUNDING = 1e-9
DOWN_AFTER_S = 300.0  # fewer engines were enough for so long
# of Kubernetes' HorizontalPodAutoscaler, as in the chart
TOLERANCE = 0.1  # a total this near to its target changes nothing
UP_EVERY_S, UP_FACTOR, UP_PODS = 15.0, 2, 2  # in such a time at most so many times, or so many more
DOWN_EVERY_S = 60.0  # one less in such a time


class EngineWork(NamedTuple):
    """What one engine tells."""

    work_s: float  # seconds of work that wait in it, as `millrace:work_seconds_waiting`
    num_running: int  # sequences
    max_running: int


class ScalingRule(Protocol):
    """Says how many engines there should be."""

    every_s: float  # how often it is asked

    def wanted(self, works: Sequence[EngineWork], num_now: int, now_s: float) -> int:
        """Engines wanted, of which there are `num_now` with those that start. `works`: of those that take requests."""
        ...


def engines_wanted(work_s: Iterable[float], busy: Iterable[float], target_s: float, num_now: int) -> int:
    """Engines after which a new request waits for about `target_s`, of engines that report this now.

    work_s    seconds that each engine needs for what waits there, as `millrace:work_seconds_waiting`
    busy      share of `max_num_seqs` that runs in each: a queue is empty also where nothing is to spare
    num_now   engines that there are, with those that start, which report nothing yet: they count as capacity, as what
              is wanted is reckoned from all work

    Going up is at once, and to as many as the work asks for. Going down is to as many as would keep half of the target.
    """
    works, shares = list(work_s), list(busy)
    for_running = math.ceil(sum(shares) / MOST_BUSY - ROUNDING)
    up = max(math.ceil(sum(works) / target_s - ROUNDING), for_running)
    if up >= num_now:
        return up
    down = max(math.ceil(sum(works) / (WAITS_LESS * target_s) - ROUNDING), for_running)
    return min(num_now, down)


class QueuedWork:
    """`engines_wanted` each second: up at once, down to the most that were wanted in the last five minutes."""

    every_s = 1.0

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._recent = RecentMaximum(DOWN_AFTER_S)

    def wanted(self, works: Sequence[EngineWork], num_now: int, now_s: float) -> int:
        busy = [work.num_running / work.max_running for work in works]
        wanted = engines_wanted([work.work_s for work in works], busy, self._target_s, num_now)
        return max(wanted, min(num_now, self._recent.note(now_s, wanted)))


class HorizontalPodAutoscaler:
    """As Kubernetes computes it each 15 seconds for the chart's two metrics, of which the larger result counts.

    target_s         seconds of work that may wait for each pod
    target_running   sequences that may run in each
    """

    every_s = 15.0

    def __init__(self, target_s: float, target_running: float) -> None:
        self._targets = target_s, target_running
        self._recent = RecentMaximum(DOWN_AFTER_S)
        self._counts: deque[tuple[float, int]] = deque()  # (when, pods) of the last minute

    def wanted(self, works: Sequence[EngineWork], num_now: int, now_s: float) -> int:
        totals = sum(work.work_s for work in works), sum(work.num_running for work in works)
        pairs = zip(totals, self._targets, strict=True)
        advised = max(self._of(total, target, num_now) for total, target in pairs)
        kept = self._recent.note(now_s, advised)
        self._counts.append((now_s, num_now))
        while self._counts[0][0] < now_s - DOWN_EVERY_S:
            self._counts.popleft()
        if advised > num_now:
            before = next(count for at_s, count in self._counts if at_s >= now_s - UP_EVERY_S)
            return min(advised, max(UP_FACTOR * before, before + UP_PODS, num_now))
        before = max(count for _, count in self._counts)
        return min(num_now, max(kept, before - 1))

    @staticmethod
    def _of(total: float, target: float, num_now: int) -> int:
        if num_now and abs(total / (target * num_now) - 1) <= TOLERANCE:
            return num_now
        return math.ceil(total / target - ROUNDING)


class RecentMaximum:
    """The largest of the numbers noted within a window, in seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._falling: deque[tuple[float, int]] = deque()  # (when, number), each smaller than those before it

    def note(self, now_s: float, number: int) -> int:
        """Notes a number, and returns the largest of the window."""
        while self._falling and self._falling[-1][1] <= number:
            self._falling.pop()
        self._falling.append((now_s, number))
        while self._falling[0][0] < now_s - self._window_s:
            self._falling.popleft()
        return self._falling[0][1]


SCALING_RULES: Mapping[str, Callable[[float, float], ScalingRule]] = {  # of (target_s, target_running)
    "queued-work": lambda target_s, _: QueuedWork(target_s),
    "hpa": HorizontalPodAutoscaler,
}
