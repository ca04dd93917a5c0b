"""Idle time of the device between two steps while there is work.

Measured by the device's clock, from a step's `done` to the start of the next. A gap counts only if some row of the
first step goes on, so that a next step was due. Gaps of a second and more are pauses in the load and do not count.
"""

from __future__ import annotations

from typing import Protocol

from ....runtime.device_streams.interface import Event
from ....runtime.histogram import Histogram
from ...messages import FinishReason, StepGrant, StepTokens

BOUNDS_US = (5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 1_000_000)
LONGEST_US = 1_000_000


class Told(Protocol):
    """The fields of a finished step that are read here."""

    grant: StepGrant | None
    began: Event
    done: Event


class IdleGaps:
    """A histogram of the gaps, in whole microseconds.

    The completion thread writes it; other threads may read it.
    """

    def __init__(self) -> None:
        self.histogram = Histogram(BOUNDS_US)
        self._due_behind: StepGrant | None = None  # the last finished step, if some row of it goes on

    def note(self, step: Told, before: Told, tokens: StepTokens) -> None:
        """Records a finished `step` with its `tokens`; `before` was submitted directly before it."""
        grant = step.grant
        assert grant is not None
        if self._due_behind is not None and self._due_behind is before.grant:
            gap_us = int(step.began.us_since(before.done))
            if gap_us < LONGEST_US:
                self.histogram.observe(max(gap_us, 0))
        goes_on = not grant.is_sampled.all() or bool((tokens.finishes == FinishReason.NONE).any())
        self._due_behind = grant if goes_on else None
