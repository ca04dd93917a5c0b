"""One viewer of the dashboard: what it may see, what it wants to see, and what it knows already.

Knows the messages of `feed.py`. Refuses to know what the figures mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from ...runtime.log import get_logger
from ...runtime.pipeline import NotServing
from ..errors import ApiError
from ..sockets.envelopes import error_members, parse
from ..sockets.frames import POLICY_VIOLATION
from ..sockets.peer import INTERNAL_ERROR, INVALID_PAYLOAD, Peer
from . import snapshots
from .block_map import BlockMap
from .derived import NowAndThen, explain, find_bottleneck
from .messages import Cancel, Hello, Subscribe, Topics, Window, read_message
from .patch import merge_patch
from .timeline import Timeline

if TYPE_CHECKING:
    from ...stages.engine import Engine
    from .feed import Feed

INTERVAL_S = 0.25  # between two updates
MAX_MESSAGE_BYTES = 16 * 1024

log = get_logger("millrace.deploy")


class Viewer:
    """One socket: who it is, what it wants, and what it knows."""

    def __init__(self, feed: Feed, peer: Peer) -> None:
        self.peer = peer
        self._feed = feed
        self._service = feed.service
        self._owner = ""  # of its API key
        self._is_admin = False  # may see whatever anybody asks, and cancel it
        self._topics = Topics()
        self._wants_something = asyncio.Event()
        self._known: dict[str, Any] = {}  # topic -> what it was told last
        self._numbers: dict[str, int] = {}  # topic that only grows -> how much of it was told
        self._blocks = BlockMap()
        self._timeline: Timeline | None = None  # of the request that it looks at
        self._explained: NowAndThen[dict[str, Any]] = NowAndThen(feed.threads)
        self._is_explained = False  # for good

    async def run(self) -> None:
        """Serves the viewer until it is gone."""
        if not await self._greet():
            return
        pushing = asyncio.get_running_loop().create_task(self._push())
        try:
            while (data := await self.peer.receive()) is not None:
                if not await self._take(data):
                    return
        finally:
            pushing.cancel()

    # -- what it says

    async def _greet(self) -> bool:
        """Waits for the hello and looks at its keys. Nothing of the server is told before."""
        config = self._service.config
        try:
            async with asyncio.timeout(config.header_timeout_s):
                data = await self.peer.receive()
        except TimeoutError:
            message = f"the hello did not arrive within {config.header_timeout_s:g} s"
            await self.peer.end(POLICY_VIOLATION, ApiError("request_timeout", message))
            return False
        if data is None:
            return False
        try:
            hello = self._read(data)
            if not isinstance(hello, Hello):
                raise ApiError("invalid_value", "type: the first message is hello", param="type")
            self._check_keys(hello)
        except ApiError as error:
            await self.peer.end(POLICY_VIOLATION, error)
            return False
        await self.peer.send(orjson.dumps(self._introduction()))
        return True

    def _check_keys(self, hello: Hello) -> None:
        feed = self._feed
        if feed.keys:
            owner = feed.keys.holder(hello.key or "")
            if owner is None:
                wrong = "is wrong" if hello.key else "is needed"
                raise ApiError("invalid_api_key", f"the API key {wrong}: the hello brings it as key")
            self._owner = owner
        if hello.admin_key:
            holder = feed.admin_keys.holder(hello.admin_key)
            if not feed.admin_keys or holder is None:
                raise ApiError("invalid_api_key", "the admin key is wrong")
            self._is_admin = True

    def _introduction(self) -> dict[str, Any]:
        return {
            "type": "hello",
            "version": self._feed.version,
            "models": list(self._service.model_names),
            "interval_s": INTERVAL_S,
            "has_admin_key": bool(self._feed.admin_keys),
            "can_cancel": self._is_admin,
        }

    async def _take(self, data: bytes) -> bool:
        """One message. False if it is the last that is read."""
        try:
            message = self._read(data)
        except ApiError as error:
            if error.code == "invalid_json":
                await self.peer.end(INVALID_PAYLOAD, error)
                return False
            await self._tell(error)
            return True
        try:
            if isinstance(message, Subscribe):
                self._subscribe(message.topics)
            elif isinstance(message, Cancel):
                self._cancel(message.id)
        except ApiError as error:
            await self._tell(error)
        return True

    def _read(self, data: bytes) -> Any:
        return read_message(parse(data, MAX_MESSAGE_BYTES), self._service.config.strict_fields)

    async def _tell(self, error: ApiError) -> None:
        await self.peer.send(b'{"type":"error",%b}' % error_members(error))

    def _subscribe(self, topics: Topics) -> None:
        for name in Topics.model_fields:
            if getattr(topics, name) is None or getattr(topics, name) != getattr(self._topics, name):
                self._known.pop(name, None)
                self._numbers.pop(name, None)
        if topics.blocks is None:
            self._blocks = BlockMap()
        if topics.request != self._topics.request:
            self._timeline, self._is_explained = None, False
            self._explained = NowAndThen(self._feed.threads)
        self._topics = topics
        if any(getattr(topics, name) is not None for name in Topics.model_fields):
            self._wants_something.set()
        else:
            self._wants_something.clear()

    def _cancel(self, request_id: str) -> None:
        if not self._is_admin:
            raise ApiError("invalid_api_key", "to cancel a request takes the admin key: the hello brings it")
        engine = self._service.engine
        if engine is None or not engine.abort(request_id, "cancel"):
            raise ApiError("request_not_found", f"no request {request_id} is under way", param="id")
        log.info("request.aborted", request_id=request_id, cause="cancel")

    # -- what it is told

    async def _push(self) -> None:
        try:
            while True:
                await self._wants_something.wait()
                await self._think()
                await self.peer.send(orjson.dumps(self.update()))
                await asyncio.sleep(INTERVAL_S)
        except ConnectionError:
            pass  # gone, or about to be told why it ends
        except Exception as error:
            log.error("dashboard.failed", error=type(error).__name__, exc_info=error)
            await self.peer.end(INTERNAL_ERROR, ApiError("internal_error", "internal error"))

    async def _think(self) -> None:
        """Has thought of what takes a while, where it is wanted and due."""
        engine, feed = self._service.engine, self._feed
        with suppress(NotServing):
            if engine is None or not engine.has_core:
                return
            tracer, now_ns = engine.pipeline.tracer, engine.pipeline.env.now_ns()
            if self._topics.overview is not None:
                parts, names = feed.trace_log(engine).window()
                await feed.bottleneck.refresh(partial(find_bottleneck, parts, names, now_ns))
            timeline = self._timeline
            if timeline is not None and timeline.sequence_id is not None and not self._is_explained:
                is_over = timeline.is_over
                is_new = await self._explained.refresh(partial(explain, tracer, timeline.sequence_id, now_ns))
                self._is_explained = is_over and is_new  # what is over need be explained once only

    def update(self) -> dict[str, Any]:
        """What is new in the topics that it wants."""
        update: dict[str, Any] = {"type": "update", "now_s": None, "full": {}, "patch": {}}
        health, engine = self._service.health, self._service.engine
        try:
            if engine is None:
                raise NotServing(health)
            update["now_s"] = round(engine.pipeline.env.now(), 4)
            for name, read in self._readers(engine).items():
                if getattr(self._topics, name) is not None:
                    read(name, update)
        except NotServing:
            update["full"]["overview"] = {"health": {"state": health.state, "reason": health.reason}}
            self._known.clear()
        return update

    def _readers(self, engine: Engine) -> dict[str, Callable[[str, dict[str, Any]], None]]:
        """topic -> what puts its news into an update."""
        service, window = self._service, self._topics.requests or Window()
        trees: dict[str, Callable[[], Any]] = {
            "overview": lambda: (
                snapshots.overview(engine, service.health) | {"bottleneck": self._feed.bottleneck.value}
            ),
            "pipeline": lambda: snapshots.pipeline(engine),
            "requests": lambda: snapshots.requests(
                engine, window.offset, window.limit, newest_first=window.newest_first, only=self._own_requests()
            ),
            "request": lambda: self._look_at(engine),
            "recent": lambda: {"rows": [told for owner, told in self._feed.recent if self._sees(owner)]},
            "latency": lambda: {} if (times := self._feed.metrics.latencies) is None else snapshots.latency(times),
            "loop": lambda: snapshots.loop_health(engine, service.oversight),
            "config": lambda: {"rows": snapshots.configuration(engine, service)},
        }

        def tree(name: str, update: dict[str, Any]) -> None:
            data = trees[name]()
            if name not in self._known:
                update["full"][name] = data
            elif news := merge_patch(self._known[name], data):
                update["patch"][name] = news
            self._known[name] = data

        def grown(name: str, update: dict[str, Any]) -> None:
            trace = self._feed.trace_log(engine)
            since = trace.steps_since if name == "steps" else trace.incidents_since
            is_new = name not in self._numbers
            found, self._numbers[name] = since(self._numbers.get(name, 0))
            rows = [tuple(row) if name == "steps" else row for row in found]  # orjson knows no named tuples
            if is_new or rows:
                update["full" if is_new else "patch"][name] = {"rows": rows, "num_skipped": trace.num_skipped}

        def blocks(name: str, update: dict[str, Any]) -> None:
            if engine.has_core and (news := self._blocks.next(engine, self._may_see)):
                update["full" if "cells" in news else "patch"][name] = news

        return dict.fromkeys(trees, tree) | {"steps": grown, "incidents": grown, "blocks": blocks}

    def _look_at(self, engine: Engine) -> dict[str, Any]:
        """The request that it wants to see; only its id if the trace knows nothing of it any more."""
        assert self._topics.request is not None
        request_id = self._topics.request.id
        if not self._may_see(request_id):
            return {"id": request_id}
        if self._timeline is None:
            self._timeline = Timeline(engine.pipeline.tracer, request_id)
        self._timeline.refresh()
        told = self._timeline.tell() or {"id": request_id}
        return told if self._explained.value is None else told | {"explained": self._explained.value}

    # -- what it may see: the requests of its own API key, or those of all with the admin key or where there are no keys

    def _sees(self, owner: str) -> bool:
        return self._is_admin or owner == self._owner

    def _own_requests(self) -> frozenset[str] | None:
        """Ids of the live requests that it may see; None: of all."""
        if self._is_admin or not self._feed.keys:
            return None
        live = self._service.live
        return frozenset(request_id for request_id, one in live.items() if one.owner == self._owner)

    def _may_see(self, request_id: str) -> bool:
        if self._is_admin or not self._feed.keys:
            return True
        service = self._service
        live = service.live.get(request_id) or service.ended.get(request_id)
        return live is not None and live.owner == self._owner
