"""What arrivals of a trace are offered to a server, whether it kept up with them, and at which rate it still does.

Plain arithmetic: no clock, no server.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.deploy.cli.bench.load import BenchRequest
from millrace.deploy.cli.bench.measures import RequestRecord, is_good, statistics
from millrace.stages.recordings.workloads import Workload

TOKEN_IDS = (300, 15_000)  # of which prompts are drawn: every shape of `shapes.py` has them
REFUSED = "429"  # how the error of a request begins that the server did not let in
STEP = 1.25  # from one rate to the next, until one is too high and one is not
CLOSE = 1.08  # the least rate known as too high, by the highest known as not: no more is asked


@dataclass(frozen=True, slots=True)
class Window:
    """Requests, and the second at which each of them comes."""

    asks: Sequence[BenchRequest]
    times_s: Sequence[float]  # ascending, the first at 0, all below `duration_s`
    duration_s: float
    stretched: float  # how many times as far apart they are as in the trace
    num_cut: int  # prompts that were shortened


@dataclass(frozen=True, slots=True)
class Bounds:
    """When a request counts as good, and when a server as one that keeps up."""

    ttft_ms: float = 5_000.0  # of a good request, until its first token; 4,000 tokens alone take two cores 3 s
    itl_ms: float = 100.0  # and in the mean between two of its tokens
    p99_ttft_ms: float = 20_000.0  # of a server that keeps up
    share: float = 0.95  # of the requests, that it has finished at the end
    settle_s: float = 30.0  # before the end: who came later than that need not have been finished


def window(trace: Workload, rate: float, duration_s: float, *, from_s: float, max_model_len: int, seed: str) -> Window:
    """As many requests of a trace as come in `duration_s` at `rate` a second, from its second `from_s` on. All gaps are
    stretched by one factor. Prompts are drawn at random, by the seed alone, and cut where they do not fit the context
    with their answers. Raises `ValueError` where the trace has too few requests, or an answer is no shorter than the
    context."""
    num = max(1, round(rate * duration_s))
    later = [request for request in trace.requests if request.arrival_s >= from_s]
    if len(later) <= num:
        raise ValueError(f"{num} requests from {from_s:g} s on, and one more: the trace has {len(later)} there")
    began_s = later[0].arrival_s
    stretched = duration_s / (later[num].arrival_s - began_s)  # the next one would come at the end
    draw, asks, num_cut = random.Random(seed), [], 0
    for request in later[:num]:
        room = max_model_len - request.num_answer
        if room < 1:
            raise ValueError(f"an answer of {request.num_answer} tokens does not fit a context of {max_model_len}")
        num_cut += request.num_prompt > room
        ids = [draw.randrange(*TOKEN_IDS) for _ in range(min(request.num_prompt, room))]
        asks.append(BenchRequest(ids, request.num_answer))
    times_s = [(request.arrival_s - began_s) * stretched for request in later[:num]]
    return Window(asks, times_s, duration_s, stretched, num_cut)


def summary(offered: Window, records: Sequence[RequestRecord], bounds: Bounds) -> dict[str, Any]:
    """What one run came to. Latencies are those of the finished requests; a request is finished if it has as many
    tokens as it was to have. Goodput counts by the seconds in which requests came, tokens by those until the last
    answer's end."""
    triples = list(zip(offered.asks, offered.times_s, records, strict=True))
    done = [(at_s, each) for asked, at_s, each in triples if each.error is None and each.num_output == asked.num_output]
    refused = sum((each.error or "").startswith(REFUSED) for each in records)
    good = sum(is_good(each, {"ttft": bounds.ttft_ms, "tpot": bounds.itl_ms}) for _, each in done)
    end_s = max([offered.duration_s, *(at_s + each.e2el_s for at_s, each in done)])
    settled_s = offered.duration_s - bounds.settle_s
    num_settled = sum(at_s <= settled_s for at_s in offered.times_s)
    in_time = sum(at_s <= settled_s and at_s + each.e2el_s <= offered.duration_s for at_s, each in done)
    ttft = statistics("ttft", [each.ttft_s for _, each in done], (99.0,))
    itl = statistics("itl", [gap_s for _, each in done for gap_s in each.itls_s], (99.0,))
    latencies = {name: (ttft | itl)[name] for name in LATENCIES}
    share = in_time / num_settled if num_settled else 0.0
    return {
        "offered": len(records),
        "finished": len(done),
        "refused": refused,
        "failed": len(records) - len(done) - refused,
        "errors": sorted({each.error[:200] for each in records if each.error is not None})[:5],
        "finished_in_time": share,
        "keeps_up": share >= bounds.share and latencies["p99_ttft_ms"] <= bounds.p99_ttft_ms,
        "output_tok_s": sum(each.num_output for _, each in done) / end_s,
        **latencies,
        "good": good / len(records),
        "goodput": good / offered.duration_s,
        "last_answer_s": end_s,
    }


LATENCIES = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")


async def highest(keeps_up: Callable[[float], Awaitable[bool]], first: float, num_probes: int) -> float | None:
    """The highest of the rates that were tried at which a server keeps up; None: at none of them. Goes up or down by
    `STEP` until the answer changes, then halves (by ratio) what is in doubt until that is less than `CLOSE`."""
    low, high, rate = None, None, first
    for _ in range(num_probes):
        if await keeps_up(rate):
            low = rate
        else:
            high = rate
        if low is not None and high is not None:
            if high / low < CLOSE:
                break
            rate = (low * high) ** 0.5
        else:
            rate = rate * STEP if high is None else rate / STEP
    return low
