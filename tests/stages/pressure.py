"""Makes certain what else depends on the speed of the machine that runs a test.

Which requests are there at the first step decides who is preempted, and the rates that a start measures decide between
a swap and computing again.
"""

from __future__ import annotations

from typing import Any


def begin_together(engine: Any, num_requests: int) -> None:
    """It is too early to plan a step, from now on until so many requests have come to be served."""
    stage = engine.core.stages.schedule
    is_early = stage._is_early

    def are_few_or_is_early() -> bool:
        if len({sequence.request_id for sequence in stage.scheduler.sequences.values()}) < num_requests:
            return True
        stage._is_early = is_early
        return bool(is_early())

    stage._is_early = are_few_or_is_early


def swap_if_there_is_room(engine: Any) -> None:
    """Sequences that are preempted are swapped out, whatever the engine has measured of copies and steps."""
    allocator = engine.core.stages.allocate.allocator
    allocator.use_rates = lambda rates: None
    if allocator.host is not None:
        allocator.host.rates = None
