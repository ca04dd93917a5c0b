"""A viewer of a recording: where it is in it, and how it goes on by itself. Each viewer has a place of its own."""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any

from ..api.schema.body import Body
from ..config import ServerConfig
from ..errors import ApiError
from ..websocket.peer import Peer
from .block_map import BlockMap
from .derived import explain, find_bottleneck
from .messages import OF_RECORDING, Play, Seek, Topics, Window
from .playhead import Playhead
from .reel import Reel
from .timeline import Timeline
from .viewer import INTERVAL_S, Read, Update, Viewer

STILL_S = 3600.0  # while nothing moves and nobody says anything


class PlayedViewer(Viewer):
    """One socket at a recording. There are no keys: whoever can open the file can look."""

    kinds: Mapping[str, type[Body]] = OF_RECORDING

    def __init__(self, reel: Reel, peer: Peer, config: ServerConfig, threads: Executor, version: str) -> None:
        super().__init__(peer, config)
        self._head = Playhead(reel)
        self._threads = threads
        self._version = version
        self._target_s = 0.0  # where it shall be, since the recording began
        self._speed = 0.0
        self._played_s = time.monotonic()  # until then time has gone on
        self._stirred = asyncio.Event()  # something is to be told before the next interval
        self._bottleneck: dict[str, Any] | None = None
        self._explained: dict[str, Any] | None = None
        self._timeline: Timeline | None = None
        self._blocks = BlockMap()

    def introduction(self) -> dict[str, Any]:
        """Of the recording."""
        said = {"type": "hello", "version": self._version, "models": [], "interval_s": INTERVAL_S}
        return said | {"has_admin_key": False, "can_cancel": False, "recording": self._head.reel.introduction()}

    def hear(self, message: Body) -> None:
        """Where to go, and how fast to go on."""
        self._advance()
        if isinstance(message, Play):
            self._speed = message.speed
            if self._speed and self._target_s >= self._head.reel.film.duration_s:
                self._target_s = 0.0  # from the end it begins anew
        elif isinstance(message, Seek):
            self._target_s = self._wanted(message)
        self._stirred.set()

    def _wanted(self, seek: Seek) -> float:
        reel, began_s = self._head.reel, self._head.reel.film.began_s
        if (seek.time_s is None) == (seek.steps is None):
            raise ApiError("invalid_value", "seek: give time_s or steps, one of them", param="time_s")
        if seek.time_s is not None:
            return min(seek.time_s, reel.film.duration_s)
        assert seek.steps is not None
        at_ns = reel.step_after(round((began_s + self._target_s) * 1e9), seek.steps)
        if at_ns is None:
            return 0.0 if seek.steps < 0 else reel.film.duration_s
        return at_ns / 1e9 - began_s + 1e-6  # of that moment, all: it is told in whole microseconds

    def changed(self, topics: Topics) -> None:
        """It is told at once."""
        if topics.blocks is None:
            self._blocks = BlockMap()
        self._stirred.set()

    # -- what it is told

    async def think(self) -> None:
        """Goes where it shall be, and thinks of what is to be said there."""
        self._stirred.clear()
        self._advance()
        await asyncio.get_running_loop().run_in_executor(self._threads, partial(self._go, self._target_s))

    async def rest(self) -> None:
        """Until time has gone on, or somebody says something."""
        wait_s = INTERVAL_S if self._speed else STILL_S
        try:
            async with asyncio.timeout(wait_s):
                await self._stirred.wait()
        except TimeoutError:
            pass

    def fill(self, update: Update) -> None:
        """From the recording as it was then."""
        update["now_s"] = round(self._head.now_s, 6)
        position = self._head.position() | {"speed": self._speed}
        self.tree("position", position, update)
        self.read(self._readers(), update)

    def _advance(self) -> None:
        """Lets time go on as it plays; it stops at the end."""
        now_s = time.monotonic()
        self._target_s += self._speed * (now_s - self._played_s)
        self._played_s = now_s
        if self._target_s >= self._head.reel.film.duration_s:
            self._target_s, self._speed = self._head.reel.film.duration_s, 0.0

    def _go(self, time_s: float) -> None:
        """In a thread."""
        head, topics = self._head, self.topics
        if time_s < head.time_s:
            self.forget()
            self._timeline, self._blocks = None, BlockMap()
        head.go(time_s)
        if topics.overview is not None:
            self._bottleneck = find_bottleneck(head.reel.window(head.now_ns), head.reel.film.names, head.now_ns)
        if topics.request is not None:
            readers = head.reel.readers(lambda: head.now_ns)
            if self._timeline is None or self._timeline.request_id != topics.request.id:
                self._timeline = Timeline(lambda: readers, topics.request.id)
            self._timeline.refresh()
            number = self._timeline.sequence_id
            self._explained = None if number is None else explain(readers, number, head.now_ns)

    def _readers(self) -> dict[str, Read]:
        """topic -> what puts its news into an update. A recording has nothing for the topics that are not here."""
        head, reel, now_ns = self._head, self._head.reel, self._head.now_ns
        window = self.topics.requests or Window()
        trees: dict[str, Callable[[], Any]] = {
            "overview": lambda: head.overview() | {"bottleneck": self._bottleneck},
            "requests": lambda: head.requests(window.offset, window.limit, newest_first=window.newest_first),
            "request": self._look_at,
            "recent": lambda: reel.recent(head.now_s),
            "latency": lambda: reel.latency(now_ns),
            "config": reel.configuration,
            "preemptions": head.preemptions,
        }

        def tree(name: str, update: Update) -> None:
            self.tree(name, trees[name](), update)

        def steps(name: str, update: Update) -> None:
            self.grown(name, lambda number: reel.steps_since(number, now_ns), 0, update)

        def incidents(name: str, update: Update) -> None:
            self.grown(name, lambda number: reel.incidents_since(number, now_ns), 0, update)

        return dict.fromkeys(trees, tree) | {"steps": steps, "incidents": incidents, "blocks": self._tell_blocks}

    def _tell_blocks(self, name: str, update: Update) -> None:
        """With when each of them changed, which the page can not see as it does of an engine that runs."""
        if news := self._blocks.next(self._head.books()):
            began_s = news["began_s"] = self._head.reel.film.began_s
            changed_s = self._head.reel.changed_s(self._head.now_ns) - began_s
            news["changed_s"] = b64encode(changed_s.astype("<f4").tobytes()).decode()
            update["full" if "cells" in news else "patch"][name] = news

    def _look_at(self) -> dict[str, Any]:
        assert self.topics.request is not None
        request_id, timeline = self.topics.request.id, self._timeline
        told = timeline.tell() if timeline is not None and timeline.request_id == request_id else None
        if told is None:
            return {"id": request_id}
        return told if self._explained is None else told | {"explained": self._explained}
