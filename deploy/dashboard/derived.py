"""Slow evaluations of the trace: the bottleneck of the pipeline, and the causes of a request's latency.

They run in a thread, only while a viewer needs them, and take at most a small share of the time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict
from typing import Any, Generic, Protocol, TypeVar

from ...runtime.trace.tracer import Records, in_order_of_time
from ...stages.insight.bottleneck import judge, load_of
from ...stages.insight.causes import causes, in_words
from ...stages.insight.trace_view import TraceView
from ...stages.insight.waterfall import TimeBar, Waterfall, waterfall

MIN_S = 2.0  # between two evaluations
SHARE = 0.02  # maximum share of time for evaluations
WINDOW_S = 5.0  # period of the trace for the bottleneck
SHARES = ("busy", "blocked", "waiting_for")
MAX_PIECES = 300  # of a row, to bound the size of a long answer's row

T = TypeVar("T")


class ReadsTrace(Protocol):
    """Reads the trace records of one thread, from a ring or from a recording."""

    def names(self) -> list[str]:
        """The names of record sources: `names()[source]`."""

    def read_since(self, cursor: int = 0) -> tuple[Records, int, int]:
        """(records since `cursor`, the next cursor, number of lost records)."""


class ThrottledValue(Generic[T]):
    """A value computed in a thread at most every `MIN_S` seconds, and less often if it takes long."""

    def __init__(self, threads: Executor) -> None:
        self.value: T | None = None
        self._threads = threads
        self._due_s = 0.0
        self._is_busy = False

    async def refresh(self, think: Callable[[], T | None]) -> bool:
        """Computes a new value and waits for it, if it is due and no other task computes it; whether it did."""
        began_s = time.monotonic()
        if self._is_busy or began_s < self._due_s:
            return False
        self._is_busy = True
        try:
            self.value = await asyncio.get_running_loop().run_in_executor(self._threads, think)
        finally:
            self._is_busy = False
            now_s = time.monotonic()
            self._due_s = now_s + max(MIN_S, (now_s - began_s) / SHARE)
        return True


def find_bottleneck(parts: list[Records], names: list[str], now_ns: int) -> dict[str, Any]:
    """The bottleneck in the last `WINDOW_S` seconds with the shares of time behind it, as in `/v1/stages`."""
    load = load_of(TraceView(in_order_of_time(parts), names), now_ns, WINDOW_S)
    shares = {name: {part: round(value, 4) for part, value in getattr(load, name).items()} for name in SHARES}
    return asdict(judge(load)) | shares


def explain(readers: Sequence[ReadsTrace], sequence_id: int, now_ns: int) -> dict[str, Any] | None:
    """The waterfall of a request by stage, and the causes of its latency.

    `sequence_id` is the request's first sequence. Times are in microseconds from its begin. None if the rings no longer
    cover it.
    """
    view = TraceView(in_order_of_time(reader.read_since()[0] for reader in readers), readers[0].names())
    fall = waterfall(view, sequence_id, now_ns)
    if fall is None:
        return None
    found = causes(view, fall)
    return {
        "sentence": in_words(fall, found),
        "total_us": (fall.end_ns - fall.begin_ns) // 1000,
        "causes": [
            {"name": one.name, "us": one.ns // 1000, "share": round(one.share, 4), "sentence": one.sentence}
            for one in found
        ],
        "rows": _rows(fall),
    }


def _rows(fall: Waterfall) -> list[dict[str, Any]]:
    """One row per stage and kind of bar, in order of first appearance."""
    by_row: dict[tuple[str, str], list[TimeBar]] = {}
    for bar in fall.bars:
        by_row.setdefault((bar.stage, bar.kind), []).append(bar)
    rows = []
    for (stage, kind), bars in by_row.items():
        total_ns = sum(bar.ns for bar in bars)
        rows.append({"stage": stage, "kind": kind, "total_us": total_ns / 1000, "pieces": _pieces(fall, bars)})
    return rows


def _pieces(fall: Waterfall, bars: list[TimeBar]) -> list[tuple[int, int, int]]:
    """(begin, end, filled part) in us; bars closer than 1/`MAX_PIECES` of the whole are merged into one piece."""
    least_ns = (fall.end_ns - fall.begin_ns) // MAX_PIECES
    pieces: list[list[int]] = []
    for bar in bars:
        if pieces and bar.begin_ns - pieces[-1][1] <= least_ns:
            pieces[-1][1] = bar.end_ns
            pieces[-1][2] += bar.ns
        else:
            pieces.append([bar.begin_ns, bar.end_ns, bar.ns])
    return [
        ((begin - fall.begin_ns) // 1000, (end - fall.begin_ns) // 1000, filled // 1000)
        for begin, end, filled in pieces
    ]
