"""A request explained as plain data: its waterfall, its steps and its causes in words."""

from __future__ import annotations

from typing import Any

from ...runtime.trace.tracer import Tracer, in_order_of_time, request_names
from .causes import causes, in_words
from .trace_view import TraceView
from .waterfall import Waterfall, waterfall

MAX_BARS = 2_000  # listed; of a longer list the first and last half of this number


def view_of(tracer: Tracer) -> TraceView:
    """All records of a tracer from the time on at which no ring has lost any.

    Callable from any thread.
    """
    parts, since_ns = [], 0
    for reader in tracer.readers():
        records, _, num_lost = reader.read_since()
        if num_lost and len(records):
            since_ns = max(since_ns, int(records["time_ns"][0]))
        parts.append(records)
    records = in_order_of_time(parts)
    return TraceView(records[records["time_ns"] >= since_ns], tracer.names())


def explain(view: TraceView, request_id: str, now_ns: int | None = None) -> dict[str, Any] | None:
    """Where the time of a request went, and why. Milliseconds, from its arrival.

    None if it is not in the trace.
    """
    numbers = [number for number, name in request_names(view.records).items() if name == request_id]
    fall = waterfall(view, numbers[-1], now_ns) if numbers else None
    if fall is None:
        return None
    found = causes(view, fall)
    return {
        "id": request_id,
        "finished": fall.cause is not None,
        "finish_cause": fall.cause,
        "total_ms": _ms(fall.end_ns - fall.begin_ns),
        "sentence": in_words(fall, found),
        "causes": [
            {"name": cause.name, "ms": _ms(cause.ns), "share": round(cause.share, 4), "sentence": cause.sentence}
            for cause in found
        ],
        "stages": _stages(fall),
        "preempted_ms": _ms(fall.total_ns("preempted")),
        "client_ms": _ms(fall.total_ns("client")),
        "preemptions": fall.num_preemptions,
        "num_sequences": fall.num_sequences,
        "steps": _steps(fall),
        "bars": _bars(fall),
        "num_bars": len(fall.bars),
    }


def _stages(fall: Waterfall) -> list[dict[str, Any]]:
    """The request's time in each stage by service, wait and blocking, in the order of first use.

    With the preempted and the client's time they add up to the total.
    """
    names = dict.fromkeys(bar.stage for bar in fall.bars if bar.kind in ("service", "wait", "blocked"))
    return [
        {
            "stage": name,
            "service_ms": _ms(fall.total_ns("service", name)),
            "wait_ms": _ms(fall.total_ns("wait", name)),
            "blocked_ms": _ms(fall.total_ns("blocked", name)),
        }
        for name in names
    ]


def _steps(fall: Waterfall) -> dict[str, int | None]:
    return {
        "num_steps": len(fall.steps),
        "first_step": fall.steps[0].step if fall.steps else None,
        "last_step": fall.steps[-1].step if fall.steps else None,
        "num_prompt_steps": sum(part.num_prompt_tokens > 0 for part in fall.steps),
        "num_prompt_tokens": sum(part.num_prompt_tokens for part in fall.steps),
        "num_decode_rows": sum(part.num_decodes for part in fall.steps),
    }


def _bars(fall: Waterfall) -> list[dict[str, Any]]:
    bars, half = fall.bars, MAX_BARS // 2
    if len(bars) > MAX_BARS:
        bars = bars[:half] + bars[-half:]
    return [
        {
            "kind": bar.kind,
            "stage": bar.stage or None,
            "begin_ms": _ms(bar.begin_ns - fall.begin_ns),
            "ms": _ms(bar.ns),
            "step": bar.step,
        }
        for bar in bars
    ]


def _ms(ns: int) -> float:
    return round(ns / 1e6, 3)
