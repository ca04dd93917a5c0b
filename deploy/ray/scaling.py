"""How many replicas Ray Serve runs, by the seconds of work that wait. Does not import Ray."""

from __future__ import annotations

from typing import Any

from ...stages.routing.scaling import engines_wanted

WORK, BUSY = "work_s", "busy"  # what each replica reports, by these names


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
        return engines_wanted(work_s.values(), busy.values(), self.target_s, context.target_num_replicas), {}
