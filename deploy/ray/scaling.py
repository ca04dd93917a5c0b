"""How many replicas Ray Serve runs, by the seconds of work that wait. Does not import Ray."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

WORK, BUSY = "work_s", "busy"  # what each replica reports, by these names
MOST_BUSY = 0.8  # share of a replica's sequences that run, above which more replicas do not come too early
WAITS_LESS = 0.5  # of the target: replicas end only once so little work would wait with fewer of them
ROUNDING = 1e-9


def replicas_wanted(work_s: Iterable[float], busy: Iterable[float], target_s: float, num_now: int) -> int:
    """Replicas after which a new request waits for about `target_s`, of replicas that report this now.

    work_s    seconds that each replica needs for what waits there, as `millrace:work_seconds_waiting`
    busy      share of `max_num_seqs` that runs in each: a queue is empty also where nothing is to spare
    num_now   replicas that there are, with those that start, which report nothing yet: they count as capacity, as what
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


class QueuedWorkPolicy:
    """The policy of a Serve deployment: called about each second with Serve's `AutoscalingContext`.

    Serve applies its delays and bounds to what this returns.
    """

    def __init__(self, target_s: float = 10.0) -> None:
        self.target_s = target_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and no state."""
        reported = context.aggregated_metrics or {}
        work_s, busy = reported.get(WORK) or {}, reported.get(BUSY) or {}
        if not work_s:  # none reports yet
            return context.target_num_replicas, {}
        return replicas_wanted(work_s.values(), busy.values(), self.target_s, context.target_num_replicas), {}
