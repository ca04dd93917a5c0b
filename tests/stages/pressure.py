"""Makes certain what else depends on the speed of the machine that runs a test.

Which requests are there at the first step decides who is preempted, and the rates that a start measures decide between
a swap and computing again.
"""

from __future__ import annotations

from typing import Any

from millrace.stages.messages import StepPlan


def begin_together(engine: Any, num_requests: int) -> None:
    """No step is planned from now on until so many requests have come to be served."""
    scheduler = engine.core.stages.schedule.scheduler
    plan = scheduler.plan

    def plan_for_all() -> StepPlan | None:
        if len({sequence.request_id for sequence in scheduler.sequences.values()}) < num_requests:
            return None
        scheduler.plan = plan
        return plan()  # type: ignore[no-any-return]

    scheduler.plan = plan_for_all


def swap_if_there_is_room(engine: Any) -> None:
    """Sequences that are preempted are swapped out, whatever the engine has measured of copies and steps."""
    allocator = engine.core.stages.allocate.allocator
    allocator.use_rates = lambda rates: None
    if allocator.host is not None:
        allocator.host.rates = None
