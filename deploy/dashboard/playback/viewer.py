"""A viewer of a recording, with its own position and speed."""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any

from ...api.schema.body import Body
from ...config import ServerConfig
from ...errors import ApiError
from ...websocket.peer import Peer
from ..block_map import BlockMap
from ..derived import explain, find_bottleneck
from ..messages import OF_RECORDING, Play, RequestWindow, Seek, Topics
from ..timeline import Timeline
from ..viewer import INTERVAL_S, Read, Update, Viewer
from .data import PlaybackData
from .position import PlaybackPosition

PAUSED_INTERVAL_S = 3600.0  # between updates while playback is paused and no message comes


class PlaybackViewer(Viewer):
    """A viewer on one socket of the replay server. There are no keys, as it listens on loopback only."""

    kinds: Mapping[str, type[Body]] = OF_RECORDING

    def __init__(
        self, playback_data: PlaybackData, peer: Peer, config: ServerConfig, threads: Executor, version: str
    ) -> None:
        super().__init__(peer, config)
        self._head = PlaybackPosition(playback_data)
        self._threads = threads
        self._version = version
        self._target_s = 0.0  # target position in seconds from the recording's begin
        self._speed = 0.0
        self._played_s = time.monotonic()  # the time up to which `_target_s` has advanced
        self._update_due = asyncio.Event()  # an update is due before the next interval
        self._bottleneck: dict[str, Any] | None = None
        self._explained: dict[str, Any] | None = None
        self._timeline: Timeline | None = None
        self._blocks = BlockMap()

    def introduction(self) -> dict[str, Any]:
        """The server's hello, with the recording's metadata."""
        hello = {"type": "hello", "version": self._version, "models": [], "interval_s": INTERVAL_S}
        return hello | {
            "has_admin_key": False,
            "can_cancel": False,
            "recording": self._head.playback_data.introduction(),
        }

    def handle_message(self, message: Body) -> None:
        """Applies a seek or play message."""
        self._advance()
        if isinstance(message, Play):
            self._speed = message.speed
            if self._speed and self._target_s >= self._head.playback_data.film.duration_s:
                self._target_s = 0.0  # restart from the end
        elif isinstance(message, Seek):
            self._target_s = self._target_of(message)
        self._update_due.set()

    def _target_of(self, seek: Seek) -> float:
        playback_data, began_s = self._head.playback_data, self._head.playback_data.film.began_s
        if (seek.time_s is None) == (seek.steps is None):
            raise ApiError("invalid_value", "seek: must have either time_s or steps", param="time_s")
        if seek.time_s is not None:
            return min(seek.time_s, playback_data.film.duration_s)
        assert seek.steps is not None
        at_ns = playback_data.step_after(round((began_s + self._target_s) * 1e9), seek.steps)
        if at_ns is None:
            return 0.0 if seek.steps < 0 else playback_data.film.duration_s
        return at_ns / 1e9 - began_s + 1e-6  # 1 us later, to include all records of that microsecond

    def changed(self, topics: Topics) -> None:
        """Makes an update due at once."""
        if topics.blocks is None:
            self._blocks = BlockMap()
        self._update_due.set()

    # -- updates to the viewer

    async def refresh(self) -> None:
        """Moves to the target position and evaluates the trace there."""
        self._update_due.clear()
        self._advance()
        await asyncio.get_running_loop().run_in_executor(self._threads, partial(self._go, self._target_s))

    async def wait_for_next_update(self) -> None:
        """Waits for the next interval or for a message of the viewer."""
        wait_s = INTERVAL_S if self._speed else PAUSED_INTERVAL_S
        try:
            async with asyncio.timeout(wait_s):
                await self._update_due.wait()
        except TimeoutError:
            pass

    def fill(self, update: Update) -> None:
        """Fills the update from the recording at the current position."""
        update["now_s"] = round(self._head.now_s, 6)
        position = self._head.position() | {"speed": self._speed}
        self.tree("position", position, update)
        self.read(self._readers(), update)

    def _advance(self) -> None:
        """Advances the target position by the elapsed time and speed; playback stops at the end."""
        now_s = time.monotonic()
        self._target_s += self._speed * (now_s - self._played_s)
        self._played_s = now_s
        if self._target_s >= self._head.playback_data.film.duration_s:
            self._target_s, self._speed = self._head.playback_data.film.duration_s, 0.0

    def _go(self, time_s: float) -> None:
        """Runs in a thread."""
        head, topics = self._head, self.topics
        if time_s < head.time_s:
            self.reset()
            self._timeline, self._blocks = None, BlockMap()
        head.go(time_s)
        if topics.overview is not None:
            self._bottleneck = find_bottleneck(
                head.playback_data.window(head.now_ns), head.playback_data.film.names, head.now_ns
            )
        if topics.request is not None:
            readers = head.playback_data.readers(lambda: head.now_ns)
            if self._timeline is None or self._timeline.request_id != topics.request.id:
                self._timeline = Timeline(lambda: readers, topics.request.id)
            self._timeline.refresh()
            number = self._timeline.sequence_id
            self._explained = None if number is None else explain(readers, number, head.now_ns)

    def _readers(self) -> dict[str, Read]:
        """topic -> the function that puts its changes into an update. Other topics do not exist in a recording."""
        head, playback_data, now_ns = self._head, self._head.playback_data, self._head.now_ns
        window = self.topics.requests or RequestWindow()
        trees: dict[str, Callable[[], Any]] = {
            "overview": lambda: head.overview() | {"bottleneck": self._bottleneck},
            "requests": lambda: head.requests(window),
            "request": self._request_details,
            "recent": lambda: playback_data.recent(head.now_s),
            "latency": lambda: playback_data.latency(now_ns),
            "config": playback_data.configuration,
            "preemptions": head.preemptions,
            "prefixes": head.prefixes,
        }

        def tree(name: str, update: Update) -> None:
            self.tree(name, trees[name](), update)

        def steps(name: str, update: Update) -> None:
            self.grown(name, lambda number: playback_data.steps_since(number, now_ns), 0, update)

        def incidents(name: str, update: Update) -> None:
            self.grown(name, lambda number: playback_data.incidents_since(number, now_ns), 0, update)

        def quantiles(name: str, update: Update) -> None:
            self.grown(name, lambda number: playback_data.quantiles_since(number, now_ns), 0, update)

        grown: dict[str, Read] = {"steps": steps, "incidents": incidents, "quantiles": quantiles}
        return dict.fromkeys(trees, tree) | grown | {"blocks": self._send_blocks}

    def _send_blocks(self, name: str, update: Update) -> None:
        """Adds the block map, with the time of each block's last change.

        For a running engine the page observes these times itself.
        """
        if changes := self._blocks.next(self._head.block_owners()):
            began_s = changes["began_s"] = self._head.playback_data.film.began_s
            changed_s = self._head.playback_data.changed_s(self._head.now_ns) - began_s
            changes["changed_s"] = b64encode(changed_s.astype("<f4").tobytes()).decode()
            update["full" if "cells" in changes else "patch"][name] = changes

    def _request_details(self) -> dict[str, Any]:
        assert self.topics.request is not None
        request_id, timeline = self.topics.request.id, self._timeline
        details = timeline.to_json() if timeline is not None and timeline.request_id == request_id else None
        if details is None:
            return {"id": request_id}
        return details if self._explained is None else details | {"explained": self._explained}
