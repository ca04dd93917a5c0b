"""How long a device stands idle between two steps although there is work: what overlap is there to avoid.

By the device's own clock: from a step's `done` to the beginning of the next. Only where some row of the first goes on,
so that a next step was due; gaps of a second and more are somebody's pause, not the host's slowness.
"""

from __future__ import annotations

from typing import Protocol

from ....runtime.device_streams.interface import Event
from ....runtime.histogram import Histogram
from ...messages import FinishReason, StepGrant, StepTokens

BOUNDS_US = (5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 1_000_000)
LONGEST_US = 1_000_000


class Told(Protocol):
    """A step that is over, as far as it matters here."""

    grant: StepGrant | None
    began: Event
    done: Event


class IdleGaps:
    """`histogram` has each gap, in whole microseconds. One thread notes; others may read."""

    def __init__(self) -> None:
        self.histogram = Histogram(BOUNDS_US)
        self._due_behind: StepGrant | None = None  # the last step told, if some row of it goes on

    def note(self, step: Told, before: Told, tokens: StepTokens) -> None:
        """`step` is over, `before` was submitted before it; `tokens` is what it told."""
        grant = step.grant
        assert grant is not None
        if self._due_behind is not None and self._due_behind is before.grant:
            gap_us = int(step.began.us_since(before.done))
            if gap_us < LONGEST_US:
                self.histogram.observe(max(gap_us, 0))
        goes_on = not grant.is_sampled.all() or bool((tokens.finishes == FinishReason.NONE).any())
        self._due_behind = grant if goes_on else None
