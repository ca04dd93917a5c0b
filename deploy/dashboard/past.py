"""One viewer's look at a past moment of a running server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from .derived import ReadsTrace, explain
from .history import Frame, HistoryLog, news_of
from .messages import RequestWindow, Topics
from .prefixes import shown_to
from .request_list import page_of
from .timeline import Timeline

if TYPE_CHECKING:
    from ...runtime.trace.tracer import Records
    from ...stages.engine.engine import Engine


class Past:
    """One viewer's position in the history. `time_s` is None while it looks at the present."""

    def __init__(self, threads: Executor, sees: Callable[[str], bool]) -> None:
        """`sees` says whether the viewer may see the requests of a key."""
        self.time_s: float | None = None
        self._threads = threads
        self._sees = sees
        self._frame: Frame | None = None
        self._topics: dict[str, Any] = {}
        self._news: dict[str, list[Any]] = {}
        self._details: dict[str, Any] | None = None
        self._shown: str | None = None  # id of the request in `_details`
        self._num_seeks = 0  # what is read for an earlier one is not shown

    @property
    def shown_s(self) -> float | None:
        """The time of the frame that is shown."""
        return None if self._frame is None else self._frame.time_s

    def seek(self, time_s: float | None) -> None:
        """Goes to a time on the engine's clock; None: to the present."""
        self.time_s, self._frame, self._details, self._shown = time_s, None, None, None
        self._num_seeks += 1

    def step(self, history: HistoryLog, frames: int) -> None:
        """Goes by a number of frames, and to the present after the last one."""
        times = [frame.time_s for frame in history.frames]
        shown_s = self.shown_s
        place = len(times) if shown_s is None else sum(time_s <= shown_s for time_s in times) - 1
        place = max(0, place + frames)
        self.seek(times[place] if place < len(times) else None)

    async def load(self, engine: Engine, history: HistoryLog, topics: Topics) -> None:
        """Reads what is shown, if it is not yet, and again if the viewer goes elsewhere meanwhile.

        Without any frame it returns to the present.
        """
        wanted = None if topics.request is None else topics.request.id
        while self.time_s is not None:
            if self._frame is None:
                await self._load_frame(history, self.time_s)
            elif wanted is not None and wanted != self._shown:
                await self._load_details(engine, self._frame, wanted)
            else:
                return

    async def _load_frame(self, history: HistoryLog, time_s: float) -> None:
        """Reads the frame at `time_s`; keeps nothing if the viewer goes elsewhere meanwhile."""
        num_seeks, frames = self._num_seeks, history.frames_until(time_s)
        if not frames:
            return self.seek(None)
        loop = asyncio.get_running_loop()
        read = await loop.run_in_executor(self._threads, lambda: (frames[-1].topics(), news_of(frames)))
        if num_seeks == self._num_seeks:
            (self._topics, self._news), self._frame = read, frames[-1]

    async def _load_details(self, engine: Engine, frame: Frame, wanted: str) -> None:
        """Reads a request as it was at a frame; keeps nothing if the viewer goes elsewhere meanwhile."""
        num_seeks, until_ns = self._num_seeks, round(1e9 * frame.time_s)
        bounded: list[ReadsTrace] = [_Until(reader, until_ns) for reader in engine.pipeline.tracer.readers()]
        loop = asyncio.get_running_loop()
        read = await loop.run_in_executor(self._threads, _details, bounded, wanted, until_ns)
        if num_seeks == self._num_seeks:
            self._details, self._shown = read, wanted

    # -- data by topic

    def tree(self, name: str, window: RequestWindow | None, request_id: str | None) -> Any:
        """The data of a topic that is a tree; {} if the frame has none."""
        match name:
            case "requests":
                rows = [row for row in self._topics["requests"] if self._may_see(row["id"])]
                return page_of(rows, window or RequestWindow())
            case "recent":
                return {"rows": [row for owner, row in self._topics["recent"] if self._sees(owner)]}
            case "request":
                seen = request_id is not None and self._may_see(request_id)
                return self._details if seen and self._details is not None else {"id": request_id}
            case "prefixes":
                return shown_to(self._topics.get("prefixes"), self._may_see)
        return self._topics.get(name, {})

    def rows(self, name: str) -> list[Any]:
        """The last steps or incidents."""
        return self._news[name]

    def blocks(self) -> dict[str, Any] | None:
        """The map of all blocks, in full."""
        blocks: dict[str, Any] | None = self._topics.get("blocks")
        if blocks is None:
            return None
        return blocks | {"owners": {slot: name for slot, name in blocks["owners"].items() if self._may_see(name)}}

    def _may_see(self, request_id: str) -> bool:
        return self._sees(self._topics["owners"].get(request_id, ""))


class _Until:
    """Reads the trace's records up to a time."""

    def __init__(self, reader: ReadsTrace, until_ns: int) -> None:
        self._reader, self._until_ns = reader, until_ns

    def names(self) -> list[str]:
        return self._reader.names()

    def read_since(self, cursor: int = 0) -> tuple[Records, int, int]:
        records, cursor, num_lost = self._reader.read_since(cursor)
        return records[records["time_ns"] <= self._until_ns], cursor, num_lost


def _details(readers: list[ReadsTrace], request_id: str, until_ns: int) -> dict[str, Any] | None:
    """Runs in a thread."""
    timeline = Timeline(lambda: readers, request_id)
    timeline.refresh()
    details = timeline.to_json()
    if details is None or timeline.sequence_id is None:
        return None
    explained = explain(readers, timeline.sequence_id, until_ns)
    return details if explained is None else details | {"explained": explained}
