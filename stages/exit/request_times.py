"""When a request came, began and ended, and what that says of it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestTimes:
    """Moments of one request on the clock of its engine, in seconds; None: not yet."""

    arrival_s: float
    began_s: float | None = None  # the device began with its first sequence
    first_token_s: float | None = None
    last_token_s: float | None = None
    stages_us: dict[str, int] = field(default_factory=dict)  # stage -> how long it had the request


def metrics(times: RequestTimes, num_tokens: int, longest: int, num_preempted: int) -> dict[str, Any]:
    """What a client is told, times in milliseconds. `num_tokens` is of all choices, `longest` of the longest one.

    Queue time ends when the device begins with the request, generation time goes from the first token to the last, and
    tokens a second are of the time in between both; a value is None where there is nothing to measure. `stages` says
    how long each stage had the request, and for those that take steps of many requests together how long it was in
    prefill and in decode.
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
