"""When a child that has ended is started again, and when it is given up. Does not depend on a clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

MOST_DEATHS, WITHIN_S = 5, 120.0  # of a front; then the server ends
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # before a start; each is twice the last one
MOST_FAILED_STARTS = 5  # of an engine, one after another


class Restarts(Protocol):
    """The ends of one child and its successors."""

    def note_ready(self) -> None:
        """It does its work."""

    def note_end(self, now_s: float) -> float | None:
        """It has ended, unasked. Returns the pause before its successor starts; None: it is given up."""

    def describe(self) -> str:
        """Why it is given up."""


@dataclass
class FrontRestarts:
    """A front is given up when it has ended five times in two minutes."""

    ends_s: deque[float] = field(default_factory=deque)

    def note_ready(self) -> None:
        """Changes nothing: a front that crashes soon after its start counts as well."""

    def note_end(self, now_s: float) -> float | None:
        self.ends_s.append(now_s)
        while self.ends_s[0] <= now_s - WITHIN_S:
            self.ends_s.popleft()
        return None if len(self.ends_s) >= MOST_DEATHS else pause(len(self.ends_s))

    def describe(self) -> str:
        return f"it has ended {len(self.ends_s)} times in {WITHIN_S / 60:g} minutes"


@dataclass
class EngineRestarts:
    """An engine is given up when it cannot be started: its fronts end the requests that kill it."""

    num_in_row: int = 0  # ends without having been ready

    def note_ready(self) -> None:
        self.num_in_row = 0

    def note_end(self, now_s: float) -> float | None:
        self.num_in_row += 1
        return None if self.num_in_row > MOST_FAILED_STARTS else pause(self.num_in_row)

    def describe(self) -> str:
        return f"{MOST_FAILED_STARTS} starts in a row have failed"


def pause(num_ends: int) -> float:
    """The pause after so many ends."""
    return float(min(FIRST_PAUSE_S * 2.0 ** (num_ends - 1), LONGEST_PAUSE_S))
