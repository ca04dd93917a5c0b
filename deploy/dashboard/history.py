"""The last 15 minutes of a running server, for the page's cursor.

A row of figures is kept each second, always. While a page is open, a frame is kept every other second: the data of all
views, compressed in a thread. Rows and frames are bounded in number, and frames in bytes.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import orjson

from .trace_log import MAX_INCIDENTS, MAX_STEPS

KEPT_S = 900.0
ROW_S, FRAME_S = 1.0, 2.0  # between two rows, and between two frames
SHARE = 0.004  # maximum share of the loop's time for frames
MAX_BYTES = 24 * 2**20  # of all frames
MAX_ROWS = round(KEPT_S / ROW_S)
COMPRESSION = 1
NEWS_FRAMES = 60  # at least, whose incidents are shown

Since = Callable[[int], tuple[list[Any], int]]  # rows after a number, and the number of all
# time, running, waiting, share of blocks held, generated tokens per second, prompt tokens per second, preemptions
Row = tuple[float, int, int, float, float, float, int]


@dataclass(frozen=True, slots=True)
class Counts:
    """The counters behind a row."""

    num_running: int
    num_waiting: int
    held: float  # share of the blocks in use
    num_generated: int
    num_prompt: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Frame:
    """All views at one time, and what was new since the frame before."""

    time_s: float
    state: bytes  # compressed JSON: topic -> data
    news: bytes  # compressed JSON: the rows of `steps` and `incidents` since the frame before

    @property
    def num_bytes(self) -> int:
        return len(self.state) + len(self.news)

    def topics(self) -> dict[str, Any]:
        """topic -> its data."""
        found: dict[str, Any] = orjson.loads(zlib.decompress(self.state))
        return found


class HistoryLog:
    """Rows and frames of one server, numbered from 0. Used on its loop."""

    def __init__(self, threads: Executor) -> None:
        self.rows: deque[Row] = deque(maxlen=MAX_ROWS)
        self.num_rows = 0  # so far
        self.frames: deque[Frame] = deque()
        self._threads = threads
        self._before: tuple[float, Counts] | None = None
        self._due_s = 0.0  # of the next frame
        self._is_busy = False
        self._read = (0, 0)  # steps and incidents in the frames so far

    # -- rows

    def note(self, now_s: float, read: Callable[[], Counts]) -> None:
        """Adds a row if a second has passed since the last one."""
        if self._before is not None and now_s - self._before[0] < ROW_S - 0.05:
            return
        counts, before = read(), self._before
        self._before = (now_s, counts)
        if before is None:
            return
        then_s, then = before
        span_s = now_s - then_s
        generated, prompt = counts.num_generated - then.num_generated, counts.num_prompt - then.num_prompt
        preempted = max(0, counts.num_preemptions - then.num_preemptions)
        rates = (round(max(0, generated) / span_s, 1), round(max(0, prompt) / span_s, 1))
        row = (round(now_s, 2), counts.num_running, counts.num_waiting, round(counts.held, 4), *rates, preempted)
        self.rows.append(row)
        self.num_rows += 1

    def rows_since(self, number: int) -> tuple[list[Any], int]:
        """(kept rows after the first `number` ones, number of all rows so far)."""
        kept = min(self.num_rows - number, len(self.rows))
        return list(self.rows)[len(self.rows) - kept :], self.num_rows

    # -- frames

    def claim(self, now_s: float) -> bool:
        """Whether the caller is to `take` the next frame, or to `release` it, as it is due and none is being made."""
        if self._is_busy or now_s < self._due_s:
            return False
        self._is_busy = True
        return True

    def release(self) -> None:
        """Gives up the frame of `claim`."""
        self._is_busy = False

    async def take(self, now_s: float, state: dict[str, Any], cost_s: float, steps: Since, incidents: Since) -> None:
        """Adds the frame of `claim`. `cost_s` is the loop's time for `state`.

        `steps` and `incidents` are `steps_since` and `incidents_since` of the trace's log.
        """
        new_steps, num_steps = steps(self._read[0])
        new_incidents, num_incidents = incidents(self._read[1])
        self._read = (num_steps, num_incidents)
        news = {"steps": [tuple(row) for row in new_steps], "incidents": new_incidents}
        self._due_s = now_s + max(FRAME_S, cost_s / SHARE)
        try:
            loop = asyncio.get_running_loop()
            frame = await loop.run_in_executor(self._threads, _packed, now_s, state, news)
        finally:
            self._is_busy = False
        self.frames.append(frame)
        num_bytes = sum(frame.num_bytes for frame in self.frames)
        while self.frames and (self.frames[0].time_s < now_s - KEPT_S or num_bytes > MAX_BYTES):
            num_bytes -= self.frames.popleft().num_bytes

    def span(self) -> dict[str, float | None]:
        """The times of the first and the last frame, in seconds on the engine's clock."""
        first, last = (self.frames[0].time_s, self.frames[-1].time_s) if self.frames else (None, None)
        return {"first_frame_s": first, "last_frame_s": last}

    def frames_until(self, time_s: float) -> list[Frame]:
        """The frames up to `time_s`, of which the last is shown; the first one if all are later."""
        return [frame for frame in self.frames if frame.time_s <= time_s] or list(self.frames)[:1]


def news_of(frames: list[Frame]) -> dict[str, list[Any]]:
    """The last steps and incidents of frames, as many as a live viewer gets. Slow: call it in a thread."""
    steps: list[Any] = []
    incidents: list[Any] = []
    for place, frame in enumerate(reversed(frames)):
        news = orjson.loads(zlib.decompress(frame.news))
        steps = news["steps"] + steps
        incidents = news["incidents"] + incidents
        if len(steps) >= MAX_STEPS and place >= NEWS_FRAMES:
            break
    return {"steps": steps[-MAX_STEPS:], "incidents": incidents[-MAX_INCIDENTS:]}


def _packed(time_s: float, state: dict[str, Any], news: dict[str, Any]) -> Frame:
    """Runs in a thread."""
    packed = (zlib.compress(orjson.dumps(each), COMPRESSION) for each in (state, news))
    return Frame(time_s, *packed)
