"""What each strike cost its clients, and the result of a run in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .checks import failures_of
from .history import ClientRequest
from .link_watch import LinkHistory
from .strikes import StrikeSpan

MAX_SHOWN = 20  # violations
STRUCK_S = 2.0  # after the end of a strike, in which requests still count as struck


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds from the strike: until a request was sent to another engine, until the last one that was there went on.

    None: none had to, or there was none. `gap_s`: the longest time without a piece of a stream that it may have hit.
    """

    noticed_s: float | None
    resumed_s: float | None
    gap_s: float
    num_moved: int
    num_failed: int


def cost_of(span: StrikeSpan, requests: Sequence[ClientRequest], links: LinkHistory) -> Cost:
    """The cost of a strike; of others at the same time, too."""
    end_s = (span.healed_s or span.began_s) + 2.0
    moved = [
        one
        for one in links.resends
        if span.began_s <= one.at_s <= end_s
        and span.strike.front in (None, int(one.front.removeprefix("front")))
        and span.strike.engine in (None, int(one.before.removeprefix("engine")))
    ]
    streams = [one for one in requests if one.is_stream and one.began_s <= span.began_s <= one.ended_s]
    if span.strike.front is not None:
        streams = [one for one in streams if one.front == span.strike.front]
    nexts, gap_s = [], 0.0
    for one in streams:
        before = max((at for at in one.times if at <= span.began_s), default=None)
        after = min((at for at in one.times if at > span.began_s), default=None)
        if after is not None:
            nexts.append(after - span.began_s)
            gap_s = max(gap_s, after - (span.began_s if before is None else before))
    noticed_s = min((one.at_s for one in moved), default=None)
    return Cost(
        noticed_s=None if noticed_s is None else noticed_s - span.began_s,
        resumed_s=max(nexts, default=None),
        gap_s=gap_s,
        num_moved=len(moved),
        num_failed=failures_of(span, requests),
    )


def describe(
    spans: Sequence[StrikeSpan],
    requests: Sequence[ClientRequest],
    links: LinkHistory,
    violations: Sequence[str],
    again: str,
) -> list[str]:
    """The lines of the report."""
    lines = [f"{'strike':<36} {'noticed':>8} {'resumed':>8} {'gap':>8} {'moved':>6} {'failed':>7}"]
    for span in sorted(spans, key=lambda one: one.began_s):
        cost = cost_of(span, requests, links)
        times = f"{_seconds(cost.noticed_s)} {_seconds(cost.resumed_s)} {_seconds(cost.gap_s)}"
        lines.append(f"{span.strike!s:<36} {times} {cost.num_moved:>6} {cost.num_failed:>7}")
    ends = Counter(one.end for one in requests)
    errors = Counter(one.error.partition(":")[0] or str(one.status) for one in requests if one.end in BAD)
    kinds = Counter(one.case.kind for one in requests)
    lines.append(f"{len(requests)} requests: " + ", ".join(f"{count} {name}" for name, count in sorted(ends.items())))
    lines.append("kinds: " + ", ".join(f"{count} {name}" for name, count in sorted(kinds.items())))
    if errors:
        lines.append("errors: " + ", ".join(f"{count} {name}" for name, count in sorted(errors.items())))
    lines.append(first_tokens(spans, requests))
    longest = max((one.longest_gap_s for one in requests), default=0.0)
    moved = f"{links.num_sent} prompts were sent to engines, {len(links.resends)} requests went on elsewhere"
    lines.append(f"{moved}; the longest gap of a stream was {longest:.2f} s")
    lines += [f"violation: {one}" for one in violations[:MAX_SHOWN]]
    if len(violations) > MAX_SHOWN:
        lines.append(f"and {len(violations) - MAX_SHOWN} more violations")
    lines.append(f"{len(violations)} violations; run it again: {again}")
    return lines


def first_tokens(spans: Sequence[StrikeSpan], requests: Sequence[ClientRequest]) -> str:
    """The time to the first text of streams: of those that no strike can have met, and of the others."""
    quiet, struck = list[float](), list[float]()
    for one in requests:
        if one.is_stream and one.times:
            is_struck = any(span.overlaps(one.began_s, one.times[0], STRUCK_S) for span in spans)
            (struck if is_struck else quiet).append(one.times[0] - one.began_s)
    found = [
        f"{_quantiles(seconds)} of {len(seconds)} {name}" for name, seconds in (("quiet", quiet), ("struck", struck))
    ]
    return f"first text, p50 and p99: {', '.join(found)} streams"


def _quantiles(seconds: Sequence[float]) -> str:
    if not seconds:
        return "none"
    ordered = sorted(seconds)
    return " and ".join(f"{ordered[int(share * (len(ordered) - 1))]:.2f} s" for share in (0.5, 0.99))


BAD = ("refused", "broken")


def _seconds(value: float | None) -> str:
    return f"{'-':>8}" if value is None else f"{value:>6.2f} s"
