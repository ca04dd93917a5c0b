"""What a recording receives of the calls of schedule and allocate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .messages import PlanReport, Rates, StepGrant, StepPlan


class CallLog(Protocol):
    """Receives the calls of schedule and allocate, in order.

    It is called on the loop, so it must be quick. It must not change its arguments, and may keep only messages, which
    are immutable.
    """

    def schedule(
        self,
        batch: Sequence[Any],
        causes: Mapping[int, str],
        plans: Sequence[StepPlan],
        failed: Sequence[int],
        is_early: bool,
    ) -> None:
        """A call of schedule: its batch, causes from the control lane, plans, sequences given up.

        `is_early`: it did not plan, as it was too early.
        """

    def allocate(
        self, batch: Sequence[StepPlan | Rates], answers: Sequence[tuple[StepGrant | None, PlanReport]]
    ) -> None:
        """A call of allocate: its batch, and its answers to the plans in it."""

    def reset_prefix_cache(self, num_freed: int) -> None:
        """A reset of the prefix cache, which freed `num_freed` blocks."""

    def crash(self, stage: str) -> None:
        """A stage crashed during a call: later calls cannot be replayed."""
