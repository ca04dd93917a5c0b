"""What the trace says that takes some thought: what limits the pipeline, and why a request took so long.

Thought of in a thread, while somebody looks, and no more of the time than a small share.
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
from ...stages.insight.waterfall import Bar, Waterfall, waterfall

MIN_S = 2.0  # between two thoughts
SHARE = 0.02  # of the time, at most
WINDOW_S = 5.0  # of the trace, in which a bottleneck is looked for
SHARES = ("busy", "blocked", "waiting_for")
MAX_PIECES = 300  # of a row, so that a long answer is no longer to send than a short one

T = TypeVar("T")


class TraceReader(Protocol):
    """What reads the records of one thread: of a ring, or of a recording."""

    def names(self) -> list[str]:
        """What they mean: `names()[source]`."""

    def read_since(self, cursor: int = 0) -> tuple[Records, int, int]:
        """Those that came since `cursor`, the cursor for the next time, and how many were lost."""


class NowAndThen(Generic[T]):
    """A value that is thought of anew in a thread: not twice within MIN_S, and longer apart if it takes long."""

    def __init__(self, threads: Executor) -> None:
        self.value: T | None = None
        self._threads = threads
        self._due_s = 0.0
        self._is_busy = False

    async def refresh(self, think: Callable[[], T | None]) -> bool:
        """Waits for the new value, if one is due and nobody else waits for it; whether that was so."""
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
    """The one sentence, and the shares of time that it is made of, of the records of the last WINDOW_S. As
    `/v1/stages` tells them."""
    load = load_of(TraceView(in_order_of_time(parts), names), now_ns, WINDOW_S)
    shares = {name: {part: round(value, 4) for part, value in getattr(load, name).items()} for name in SHARES}
    return asdict(judge(load)) | shares


def explain(readers: Sequence[TraceReader], sequence_id: int, now_ns: int) -> dict[str, Any] | None:
    """The bars of the request whose first sequence that is, by stage, and the causes of its latency; times in
    microseconds from its begin. None if the rings do not reach back so far."""
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
    """A row for each kind of bar of each stage, in the order in which they first come."""
    by_row: dict[tuple[str, str], list[Bar]] = {}
    for bar in fall.bars:
        by_row.setdefault((bar.stage, bar.kind), []).append(bar)
    rows = []
    for (stage, kind), bars in by_row.items():
        total_ns = sum(bar.ns for bar in bars)
        rows.append({"stage": stage, "kind": kind, "total_us": total_ns / 1000, "pieces": _pieces(fall, bars)})
    return rows


def _pieces(fall: Waterfall, bars: list[Bar]) -> list[tuple[int, int, int]]:
    """(begin, end, of it filled) of what can be told apart: bars that lie closer together than that are one piece."""
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
