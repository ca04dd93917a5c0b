"""What a simulation found: the outcome of each request, and the figures of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PERCENTILES = (50, 90, 99)
SUMS = (  # fields of several engines that add up
    *("num_steps", "busy_s", "num_preemptions", "num_recomputed_tokens", "num_queries", "num_hits"),
    *("num_draft_tokens", "num_accepted_tokens"),
)


@dataclass(slots=True)
class RequestOutcome:
    """The outcome of one request. Times since the trace began."""

    arrival_s: float
    num_prompt: int
    num_tokens: int = 0  # of the answer
    first_token_s: float | None = None
    end_s: float | None = None
    how: str = "unfinished"  # or: finished, left, too long, turned away

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


@dataclass(slots=True)
class SimulationResult:
    """The result of a simulation."""

    outcomes: list[RequestOutcome]
    itl_s: NDArray[np.float64]  # [T] times between successive tokens of all answers
    num_steps: int = 0
    busy_s: float = 0.0  # of the device
    duration_s: float = 0.0  # from the first arrival to the last token
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_queries: int = 0  # prompt tokens looked up in the prefix cache
    num_hits: int = 0  # of those, found
    most_rows: int = 0  # of any step
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of the drafts

    @property
    def cache_hit_rate(self) -> float:
        """Share of prompt tokens found in the prefix cache."""
        return self.num_hits / self.num_queries if self.num_queries else 0.0

    def summary(self) -> dict[str, float | int | None]:
        """The figures of a table: rates per second of the whole duration, times in milliseconds."""
        finished = [outcome for outcome in self.outcomes if outcome.how == "finished"]
        ttft_s = np.array([outcome.ttft_s for outcome in self.outcomes if outcome.ttft_s is not None])
        e2el_s = np.array([each.end_s - each.arrival_s for each in finished if each.end_s is not None])
        seconds = max(self.duration_s, 1e-9)
        figures: dict[str, float | int | None] = {
            "num_requests": len(self.outcomes),
            "finished": len(finished),
            "turned_away": sum(outcome.how in ("turned away", "too long") for outcome in self.outcomes),
            "duration_s": self.duration_s,
            "requests_per_s": len(finished) / seconds,
            "output_tokens_per_s": sum(outcome.num_tokens for outcome in self.outcomes) / seconds,
        }
        for name, times_s in (("ttft", ttft_s), ("itl", self.itl_s), ("e2el", e2el_s)):
            for percentile in PERCENTILES:
                value_ms = float(np.percentile(times_s, percentile)) * 1e3 if len(times_s) else None
                figures[f"{name}_p{percentile}_ms"] = value_ms
        return figures | {
            "preemptions": self.num_preemptions,
            "recomputed_tokens": self.num_recomputed_tokens,
            "cache_hit_rate": self.cache_hit_rate,
            "device_busy": self.busy_s / seconds,
            "most_rows": self.most_rows,
            "draft_tokens": self.num_draft_tokens,
            "accepted_tokens": self.num_accepted_tokens,
            "num_steps": self.num_steps,
        }


def merged(results: Sequence[SimulationResult]) -> SimulationResult:
    """The results of several engines as one, in their order."""
    outcomes = [outcome for result in results for outcome in result.outcomes]
    ends_s = [outcome.end_s for outcome in outcomes if outcome.end_s is not None]
    began_s = min((outcome.arrival_s for outcome in outcomes), default=0.0)
    whole = SimulationResult(outcomes, np.concatenate([result.itl_s for result in results]))
    whole.duration_s = max(ends_s, default=began_s) - began_s
    whole.most_rows = max(result.most_rows for result in results)
    for name in SUMS:
        setattr(whole, name, sum(getattr(result, name) for result in results))
    return whole
