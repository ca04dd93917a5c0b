"""See inside: the stages and what limits them, the requests under way, and where the time of one of them went.

With an API key one sees the requests of that key, with the admin key those of all; nobody sees prompts or answers here.
Derivations run in a thread, as a trace of many records takes milliseconds to read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ..stages.insight.bottleneck import Load, judge, load_of
from ..stages.insight.explain import explain, view_of
from .errors import ApiError, shorten
from .keys import Keys
from .middleware import OWNER
from .routes import answer
from .service import Live, Service

if TYPE_CHECKING:
    from ..runtime.graph import Edge
    from ..stages.engine import Engine


class Inside:
    """The handlers of one server."""

    def __init__(self, service: Service, threads: Executor) -> None:
        self.service = service
        self._threads = threads
        config = service.config
        self.keys = Keys([*config.api_key, *config.admin_key] if config.api_key else [])
        self._admins = Keys(config.admin_key).holders if config.api_key else frozenset[str]()

    @property
    def handlers(self) -> frozenset[Any]:
        """Those that `keys` open: an API key or the admin key."""
        return frozenset({self.requests, self.explain})

    def table(self) -> list[web.RouteDef]:
        """All routes."""
        return [
            web.get("/v1/stages", self.stages),
            web.get("/v1/requests", self.requests),
            web.get("/v1/requests/{id:.+}/explain", self.explain),
        ]

    async def stages(self, request: web.Request) -> web.Response:
        """What each stage does, how full each edge is, and what limits them all."""
        engine = self.service.require_engine()
        tracer, now_ns = engine.pipeline.tracer, engine.pipeline.env.now_ns()
        load = await self._in_thread(lambda: load_of(view_of(tracer), now_ns))
        return answer(stages_report(engine, load))

    async def requests(self, request: web.Request) -> web.Response:
        """The requests under way, oldest first."""
        engine = self.service.require_engine()
        live = {name: one for name, one in self.service.live.items() if self._may_see(request, one)}
        return answer({"object": "list", "data": requests_report(engine, live)})

    async def explain(self, request: web.Request) -> web.Response:
        """Where the time of a request went; one that ended a while ago is forgotten."""
        engine, some_id = self.service.require_engine(), request.match_info["id"]
        answer_id = self._find(request, some_id)
        tracer, now_ns = engine.pipeline.tracer, engine.pipeline.env.now_ns()
        told = None
        if answer_id is not None:
            told = await self._in_thread(lambda: explain(view_of(tracer), answer_id, now_ns))
        if told is None:
            message = f"no request {shorten(repr(some_id), 128)} is under way, nor has one ended a short while ago"
            raise ApiError("request_not_found", message, param="id")
        return answer(told)

    def _may_see(self, request: web.Request, live: Live) -> bool:
        return request[OWNER] in (live.owner, *self._admins)

    def _find(self, request: web.Request, some_id: str) -> str | None:
        """The newest of that answer id or X-Request-Id that whoever asks may see."""
        for requests in (self.service.live, self.service.ended):
            for answer_id, live in reversed(requests.items()):
                if some_id in (answer_id, live.client_id) and self._may_see(request, live):
                    return answer_id
        return None

    async def _in_thread(self, function: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def stages_report(engine: Engine, load: Load) -> dict[str, Any]:
    """Shares are of the last `window_s` seconds, [0, 1]."""
    limit, pipeline = judge(load), engine.pipeline
    return {
        "bottleneck": {"situation": limit.situation, "stage": limit.stage, "sentence": limit.sentence},
        "window_s": round(load.window_s, 3),
        "stages": [_stage(name, load, engine) for name in pipeline.stages],
        "edges": [_edge(edge, load, engine) for edge in pipeline.edges],
        "steps": {
            "per_s": round(load.num_steps / load.window_s, 3),
            "rows": round(load.num_rows, 3),
            "prompt_tokens_per_s": round(load.num_prompt_tokens / load.window_s, 3),
            "decode_tokens_per_s": round(load.num_decode_tokens / load.window_s, 3),
        },
        "waiting_for": {name: round(share, 4) for name, share in sorted(load.waiting_for.items())},
    }


def _stage(name: str, load: Load, engine: Engine) -> dict[str, Any]:
    runner = engine.pipeline.runners[name]
    busy, blocked = load.busy.get(name, 0.0), load.blocked.get(name, 0.0)
    blocked = min(blocked, 1.0 - busy)
    return {
        "name": name,
        "busy": round(busy, 4),
        "blocked": round(blocked, 4),
        "idle": round(1.0 - busy - blocked, 4),
        "is_busy": runner.is_busy,
        "restarts": runner.num_restarts,
    }


def _edge(edge: Edge, load: Load, engine: Engine) -> dict[str, Any]:
    channel = engine.pipeline.channels[edge.name]
    stats = channel.stats()
    return {
        "name": edge.name,
        "from": edge.source.stage,
        "to": edge.target.stage,
        "depth": stats.depth,
        "capacity": stats.capacity,
        "high_water": stats.high_water,
        "sent": stats.num_sent,
        "full": round(load.full.get(edge.name, 0.0), 4),
        "senders_waiting": channel.num_waiting,
    }


# -- requests under way


def requests_report(engine: Engine, live: Mapping[str, Live]) -> list[dict[str, Any]]:
    """Of each of `live` that the engine has, without a word of what is said."""
    exit, now_s = engine.pipeline.exit, engine.pipeline.env.now()
    assert exit is not None
    found = []
    for answer_id, one in live.items():
        outbox = exit.live.get(answer_id)
        if outbox is not None:
            stage, _ = exit.locate(outbox)  # type: ignore[attr-defined]
            found.append(_request(engine, one, outbox, stage, now_s))
    return sorted(found, key=lambda request: -request["age_s"])


def _request(engine: Engine, live: Live, outbox: Any, stage: str, now_s: float) -> dict[str, Any]:
    request = outbox.request
    first, num_sequences = request.first_sequence_id, request.num_sequences
    known = engine.scheduler.sequences if engine.has_core else {}
    sequences = [known[number] for number in range(first, first + num_sequences) if number in known]
    states = [sequence.state.value for sequence in sequences]
    slots = [sequence.slot for sequence in sequences if sequence.state.value == "running"]
    is_parked = bool(sequences) and all(sequence.is_parked for sequence in sequences)
    return {
        "id": outbox.request_id,
        "client_request_id": live.client_id,
        "stage": stage,
        "state": "parked" if is_parked else states[0] if len(set(states)) == 1 else "running" if slots else stage,
        "age_s": round(max(0.0, now_s - request.arrival_s), 3),
        "priority": request.priority,
        "num_sequences": num_sequences,
        "num_prompt_tokens": outbox.num_prompt_tokens or sum(sequence.num_prompt for sequence in sequences[:1]),
        "num_cached_tokens": outbox.num_cached_tokens,
        "num_generated_tokens": outbox.num_generated_tokens,
        "num_blocks": int(engine.block_tables.num_blocks[slots].sum()) if slots else 0,
        "preemptions": sum(sequence.num_preempted for sequence in sequences),
    }
