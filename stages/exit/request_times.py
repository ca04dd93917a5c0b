"""The times of a request, and the metrics derived from them. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestTimes:
    """Times of one request on the monotonic clock of its engine, in seconds; None: not yet."""

    arrival_s: float
    began_s: float | None = None  # when the device began with its first sequence
    first_token_s: float | None = None
    last_token_s: float | None = None
    stages_us: dict[str, int] = field(default_factory=dict)  # stage -> time that the stage spent on the request

    def begin(self, began_s: float | None) -> None:
        """Records when the device began with a sequence of the request; None: it did not, or it is not known."""
        if began_s is not None:
            self.began_s = began_s if self.began_s is None else min(self.began_s, began_s)


def metrics(times: RequestTimes, num_tokens: int, longest: int, num_preempted: int) -> dict[str, Any]:
    """The metrics reported to clients: times in ms, None where there is nothing to measure.

    `num_tokens` is the total of all choices, `longest` that of the longest one. Queue time ends when the device begins
    with the request. Generation time is from the first token to the last. Tokens per second covers the time from the
    device's beginning to the last token. `stages` has the time spent in each stage; the stages of the step loop, which
    serve many requests together, appear as prefill and decode.
    """
    generation_s = _between(times.first_token_s, times.last_token_s)
    served_s = _between(times.began_s, times.last_token_s)
    return {
        "time_to_first_token_ms": _ms(_between(times.arrival_s, times.first_token_s)),
        "queue_time_ms": _ms(_between(times.arrival_s, times.began_s)),
        "generation_time_ms": _ms(generation_s),
        "mean_itl_ms": None if generation_s is None or longest < 2 else _ms(generation_s / (longest - 1)),
        "tokens_per_second": round(num_tokens / served_s, 3) if served_s else None,
        "preemptions": num_preempted,
        "stages": {
            **{stage: _ms(us / 1e6) for stage, us in times.stages_us.items()},
            "prefill": _ms(_between(times.began_s, times.first_token_s)),
            "decode": _ms(generation_s),
        },
    }


def _between(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else max(0.0, end_s - begin_s)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
