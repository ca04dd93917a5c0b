"""A viewer of a running engine: its permissions, and the source of each topic's data.

It sees the requests of its API key; with the admin key, or on a server without keys, all requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ...runtime.env.log import get_logger
from ...runtime.pipeline import NotServing
from ..api.schema.body import Body
from ..errors import ApiError
from ..websocket.peer import Peer
from . import snapshots
from .block_map import BlockMap
from .derived import ThrottledValue, explain, find_bottleneck
from .fleet import fleet
from .live_sources import LiveSources
from .messages import CancelRequest, Hello, RequestWindow, Seek, Topics
from .past import Past
from .request_list import LiveRequests
from .timeline import Timeline
from .viewer import INTERVAL_S, Read, Update, Viewer

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine

TIMELESS = {"history", "config", "fleet"}  # topics that are the same at any time
PAST_INTERVAL_S = 1.0  # between updates of the past, unless the viewer moves

log = get_logger("millrace.deploy")


class LiveViewer(Viewer):
    """A viewer on one socket of a running server."""

    def __init__(self, sources: LiveSources, peer: Peer) -> None:
        super().__init__(peer, sources.service.config)
        self._sources = sources
        self._service = sources.service
        self._owner = ""  # of its API key
        self._is_admin = False  # may see and cancel all requests
        self._blocks = BlockMap()
        self._requests = LiveRequests()
        self._past = Past(sources.threads, self._sees)
        self._update_due = asyncio.Event()  # the viewer has gone elsewhere in time
        self._timeline: Timeline | None = None  # of the request in topic `request`
        self._explained: ThrottledValue[dict[str, Any]] = ThrottledValue(sources.threads)
        self._is_explained = False  # the request is over, and `_explained` is final

    # -- messages of the viewer

    def check(self, hello: Hello) -> None:
        """Checks the keys of the hello; the admin key alone is enough. `ApiError` for a missing or wrong key."""
        sources = self._sources
        if hello.admin_key:
            holder = sources.admin_keys.holder(hello.admin_key)
            if not sources.admin_keys or holder is None:
                raise ApiError("invalid_api_key", "the admin key is wrong")
            self._is_admin = True
        if sources.keys and not (self._is_admin and hello.key is None):
            owner = sources.keys.holder(hello.key or "")
            if owner is None:
                wrong = "is wrong" if hello.key else "is missing"
                raise ApiError("invalid_api_key", f"the API key {wrong}; send it as key in the hello")
            self._owner = owner

    def introduction(self) -> dict[str, Any]:
        """The server's hello, with the permissions of this viewer."""
        return {
            "type": "hello",
            "version": self._sources.version,
            "models": list(self._service.model_names),
            "interval_s": INTERVAL_S,
            "has_keys": bool(self._sources.keys),
            "has_admin_key": bool(self._sources.admin_keys),
            "can_cancel": self._is_admin,
            "front": None if (fronts := self._service.fronts) is None else fronts.number,
            "fronts": [] if fronts is None else sorted(fronts.numbers),
            "chat": self._chat(),
        }

    def _chat(self) -> dict[str, Any] | None:
        """What the playground may offer; None until the engine is ready."""
        engine, chat_format = self._service.engine, self._service.chat_format
        if engine is None or chat_format is None:
            return None
        return {
            "has_template": engine.info.has_chat_template,
            "shows_tools": chat_format.shows_tools({}),
            "has_auto_tools": chat_format.has_auto_tools,
            "max_logprobs": engine.config.max_logprobs,
        }

    def handle_message(self, message: Body) -> None:
        """Cancels a request, or goes to a time of the last minutes.

        `ApiError` for a cancel without the admin key or of an unknown request.
        """
        if isinstance(message, Seek):
            return self._seek(message)
        assert isinstance(message, CancelRequest)
        if not self._is_admin:
            raise ApiError("invalid_api_key", "cancel needs the admin key; send it as admin_key in the hello")
        engine = self._service.engine
        if engine is None or not engine.abort(message.id, "cancel"):
            raise ApiError("request_not_found", f"request {message.id} is not running", param="id")
        log.info("request.aborted", request_id=message.id, cause="cancel")

    def _seek(self, message: Seek) -> None:
        if message.steps is not None:
            self._past.step(self._sources.history, message.steps)
        else:
            self._past.seek(message.time_s)
        for name in (self._known.keys() | self._numbers.keys()) - TIMELESS:
            self._known.pop(name, None)
            self._numbers.pop(name, None)
        self._blocks = BlockMap()
        self._update_due.set()

    async def wait_for_next_update(self) -> None:
        """Waits for the next interval; of the past also for a message that goes elsewhere."""
        if self._past.time_s is None and not self._update_due.is_set():
            return await super().wait_for_next_update()
        with suppress(TimeoutError):
            async with asyncio.timeout(PAST_INTERVAL_S):
                await self._update_due.wait()
        self._update_due.clear()

    def changed(self, topics: Topics) -> None:
        """Drops the state of topics that are no longer subscribed."""
        if self._past.time_s is not None:
            self._update_due.set()
        if topics.blocks is None:
            self._blocks = BlockMap()
        if topics.request != self.topics.request:
            self._timeline, self._is_explained = None, False
            self._explained = ThrottledValue(self._sources.threads)

    # -- updates to the viewer

    async def refresh(self) -> None:
        """Refreshes the bottleneck and the explained request, if subscribed and due."""
        engine, sources = self._service.engine, self._sources
        with suppress(NotServing):
            if engine is None or not engine.has_core:
                return
            topics = self.topics
            await engine.refresh(with_blocks=topics.blocks is not None, with_stacks=topics.loop is not None)
            if topics.history is not None:
                await self._sources.keep_history(engine)
            if topics.prefixes is not None:
                await self._sources.prefixes.refresh(engine)
            if self._past.time_s is not None:
                return await self._past.load(engine, self._sources.history, topics)
            tracer, now_ns = engine.pipeline.tracer, engine.pipeline.env.now_ns()
            if self.topics.overview is not None:
                parts, names = sources.trace_log(engine).window()
                await sources.bottleneck.refresh(partial(find_bottleneck, parts, names, now_ns))
            timeline = self._timeline
            if timeline is not None and timeline.sequence_id is not None and not self._is_explained:
                is_over = timeline.is_over
                readers = tracer.readers()
                is_new = await self._explained.refresh(partial(explain, readers, timeline.sequence_id, now_ns))
                self._is_explained = is_over and is_new  # a request that is over is explained once only

    def fill(self, update: Update) -> None:
        """Fills the update from the engine; without an engine, with the server's health."""
        health, engine = self._service.health, self._service.engine
        try:
            if engine is None:
                raise NotServing(health)
            if (shown_s := self._past.shown_s) is not None:
                update["now_s"], update["past"] = shown_s, True
                update["live_s"] = round(engine.pipeline.env.now(), 4)
                return self.read(self._past_readers(engine), update)
            update["now_s"] = round(engine.pipeline.env.now(), 4)
            self.read(self._readers(engine), update)
        except NotServing:
            update["full"]["overview"] = {"health": {"state": health.state, "reason": health.reason}}
            self.reset()

    def _readers(self, engine: Engine) -> dict[str, Read]:
        """topic -> the function that puts its changes into an update."""
        service, topics, window = self._service, self.topics, self.topics.requests or RequestWindow()
        has_blocks = topics.blocks is not None
        status = engine.status(with_sequences=has_blocks or topics.requests is not None, with_blocks=has_blocks)
        trees: dict[str, Callable[[], Any]] = {
            "overview": lambda: self._sources.overview(engine, status),
            "pipeline": lambda: self._sources.pipeline(engine, status),
            "requests": lambda: self._requests.page(engine, status, window, self._own_requests()),
            "request": lambda: self._request_details(engine),
            "recent": lambda: {"rows": [row for owner, row in self._sources.recent if self._sees(owner)]},
            "latency": lambda: {} if (times := self._sources.metrics.latencies) is None else snapshots.latency(times),
            "loop": lambda: snapshots.loop_health(engine, service.watchdog),
            "config": lambda: {"rows": snapshots.configuration(engine, service)},
            "prefixes": lambda: self._sources.prefixes.seen_by(self._may_see),
            "fleet": lambda: fleet(engine, service, self._sources.warm, self._may_see),
        }

        def tree(name: str, update: Update) -> None:
            self.tree(name, trees[name](), update)

        def steps(name: str, update: Update) -> None:
            trace = self._sources.trace_log(engine)

            def since(number: int) -> tuple[list[Any], int]:
                rows, count = trace.steps_since(number)
                return [tuple(row) for row in rows], count  # orjson knows no named tuples

            self.grown(name, since, trace.num_skipped, update)

        def incidents(name: str, update: Update) -> None:
            trace = self._sources.trace_log(engine)
            self.grown(name, trace.incidents_since, trace.num_skipped, update)

        def quantiles(name: str, update: Update) -> None:
            if (kept := self._sources.metrics.latency_log) is not None:
                self.grown(name, kept.rows_since, 0, update)

        def blocks(name: str, update: Update) -> None:
            block_owners = snapshots.block_owners(engine, status)
            if block_owners is not None and (changes := self._blocks.next(block_owners, self._may_see)):
                update["full" if "cells" in changes else "patch"][name] = changes

        grown: dict[str, Read] = {"steps": steps, "incidents": incidents, "quantiles": quantiles}
        return dict.fromkeys(trees, tree) | grown | {"blocks": blocks, "history": self._history}

    def _history(self, name: str, update: Update) -> None:
        history = self._sources.history
        self.grown(name, history.rows_since, 0, update)
        for part in (update["full"], update["patch"]):
            if name in part:
                part[name] |= history.span()

    def _past_readers(self, engine: Engine) -> dict[str, Read]:
        """As `_readers`, of the moment that is shown. Settings are those of now, as they do not change."""
        past, topics, present = self._past, self.topics, self._readers(engine)
        request_id = None if topics.request is None else topics.request.id

        def tree(name: str, update: Update) -> None:
            self.tree(name, past.tree(name, topics.requests, request_id), update)

        def grown(name: str, update: Update) -> None:
            self.grown(name, lambda number: (past.rows(name)[number:], len(past.rows(name))), 0, update)

        def quantiles(name: str, update: Update) -> None:
            log, until_s = self._sources.metrics.latency_log, past.shown_s or 0.0
            rows = [] if log is None else [row for row in log.rows if row[0] <= until_s]
            self.grown(name, lambda number: (rows[number:], len(rows)), 0, update)

        def blocks(name: str, update: Update) -> None:
            if name not in self._known and (cells := past.blocks()) is not None:
                update["full"][name] = self._known[name] = cells

        trees = ("overview", "pipeline", "requests", "request", "recent", "latency", "loop", "prefixes")
        found: dict[str, Read] = {}
        found |= dict.fromkeys(trees, tree) | {"steps": grown, "incidents": grown}
        found |= {"quantiles": quantiles, "blocks": blocks, "history": self._history}
        return found | {name: present[name] for name in ("config", "fleet")}

    def _request_details(self, engine: Engine) -> dict[str, Any]:
        """The data of topic `request`; only the id if the trace no longer covers the request."""
        assert self.topics.request is not None
        request_id = self.topics.request.id
        if not self._may_see(request_id):
            return {"id": request_id}
        if self._timeline is None:
            self._timeline = Timeline(engine.pipeline.tracer.readers, request_id)
        self._timeline.refresh()
        details = self._timeline.to_json() or {"id": request_id}
        return details if self._explained.value is None else details | {"explained": self._explained.value}

    # -- permissions

    def _sees(self, owner: str) -> bool:
        return self._is_admin or owner == self._owner

    def _own_requests(self) -> frozenset[str] | None:
        """Ids of the live requests that the viewer may see; None: all."""
        if self._is_admin or not self._sources.keys:
            return None
        live = self._service.live
        return frozenset(request_id for request_id, one in live.items() if one.owner == self._owner)

    def _may_see(self, request_id: str) -> bool:
        if self._is_admin or not self._sources.keys:
            return True
        service = self._service
        live = service.live.get(request_id) or service.ended.get(request_id)
        return live is not None and live.owner == self._owner
