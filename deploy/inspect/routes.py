"""`/v1/stages`, `/v1/requests` and `/v1/requests/{id}/explain`: load, running requests and their latency.

An API key shows the requests of that key, the admin key those of all; prompts and answers are never shown. The trace is
evaluated in a thread, as reading many records takes milliseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ...stages.insight.bottleneck import WindowLoad, judge, load_of
from ...stages.insight.explain import explain, view_of
from ..api.service import MAX_ENDED, ActiveRequest, Service
from ..errors import ApiError, shorten
from ..http.api_keys import ApiKeys
from ..http.query_params import whole_number
from ..http.request_context import OWNER
from ..http.responses import answer
from .request_history import RequestHistory

if TYPE_CHECKING:
    from ...runtime.graph import Edge
    from ...runtime.pipeline_status import PipelineStatus, StageStatus
    from ...runtime.trace.tracer import Tracer
    from ...stages.engine.engine import Engine
    from ...stages.engine.engine_status import EngineStatus

MAX_LISTED = 1_000  # requests in one answer
MAX_CURSOR = 2**53


class InspectRoutes:
    """The handlers of one server."""

    def __init__(self, service: Service, threads: Executor) -> None:
        self.service = service
        self.history = RequestHistory()
        self._threads = threads
        config = service.config
        self.keys = ApiKeys([*config.api_key, *config.admin_key] if config.api_key else [])
        self._admins = ApiKeys(config.admin_key).holders if config.api_key else frozenset[str]()

    @property
    def handlers(self) -> frozenset[Any]:
        """The handlers that accept `keys`: an API key or the admin key."""
        return frozenset({self.requests, self.explain})

    def table(self) -> list[web.RouteDef]:
        """All routes."""
        return [
            web.get("/v1/stages", self.stages),
            web.get("/v1/requests", self.requests),
            web.get("/v1/requests/{id:(?s:.+)}/explain", self.explain),
        ]

    async def stages(self, request: web.Request) -> web.Response:
        """`GET /v1/stages`: load of each stage, fill level of each channel, and the bottleneck."""
        engine = self.service.require_engine()
        await engine.refresh()
        tracer, now_ns = engine.pipeline.tracer, engine.pipeline.env.now_ns()
        load = await self._in_thread(lambda: load_of(view_of(tracer), now_ns))
        return answer(stages_report(engine, load))

    async def requests(self, request: web.Request) -> web.Response:
        """`GET /v1/requests`: `limit` running requests in order of arrival, from `cursor` on.

        Requests may end between two pages; no other request is skipped or repeated for that.
        """
        engine = self.service.require_engine()
        await engine.refresh()
        limit = whole_number(request, "limit", MAX_LISTED, least=1, most=MAX_LISTED)
        cursor = whole_number(request, "cursor", 0, least=0, most=MAX_CURSOR)
        live = {name: one for name, one in self.service.live.items() if self._may_see(request, one)}
        rows, next_cursor = requests_report(engine, live, cursor, limit)
        more = {"has_more": next_cursor is not None, "next_cursor": next_cursor}
        return answer({"object": "list", "data": rows} | more)

    async def explain(self, request: web.Request) -> web.Response:
        """`GET /v1/requests/{id}/explain`: the latency of a request, from the trace.

        A request that the trace does not cover gets a summary; one that ended long ago is not found.
        """
        engine, some_id = self.service.require_engine(), request.match_info["id"]
        answer_id = self._find(request, some_id)
        tracer, now_ns = engine.pipeline.tracer, engine.pipeline.env.now_ns()
        explanation = None
        if answer_id is not None:
            explanation = await self._in_thread(lambda: self._explain(tracer, answer_id, now_ns))
        if explanation is None:
            message = (
                f"request {shorten(repr(some_id), 128)} is neither running nor among the last {MAX_ENDED:,} ended"
                " ones; look for older ones in the log, in the spans of --otlp-traces-endpoint, or in a recording"
                " of --record"
            )
            raise ApiError("request_not_found", message, param="id")
        return answer(explanation)

    def _explain(self, tracer: Tracer, answer_id: str, now_ns: int) -> dict[str, Any] | None:
        """Runs in a thread."""
        view = view_of(tracer)
        if explanation := explain(view, answer_id, now_ns):
            return {"detail": "trace"} | explanation
        moments = self.history.find(answer_id)
        return None if moments is None else moments.explain((now_ns - view.begin_ns) / 1e9)

    def _may_see(self, request: web.Request, live: ActiveRequest) -> bool:
        return request[OWNER] in (live.owner, *self._admins)

    def _find(self, request: web.Request, some_id: str) -> str | None:
        """The answer id of the newest request with this answer id or X-Request-Id that the client may see."""
        for requests in (self.service.live, self.service.ended):
            for answer_id, live in reversed(requests.items()):
                if some_id in (answer_id, live.client_id) and self._may_see(request, live):
                    return answer_id
        return None

    async def _in_thread(self, function: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def stages_report(engine: Engine, load: WindowLoad) -> dict[str, Any]:
    """The body of `/v1/stages`. Shares are of the last `window_s` seconds, in [0, 1]."""
    limit, pipeline = judge(load), engine.pipeline.status()
    return {
        "bottleneck": {"situation": limit.situation, "stage": limit.stage, "sentence": limit.sentence},
        "window_s": round(load.window_s, 3),
        "stages": [_stage(stage, load) for stage in pipeline.stages.values()],
        "edges": [_edge(edge, load, pipeline) for edge in pipeline.edges],
        "steps": {
            "per_s": round(load.num_steps / load.window_s, 3),
            "rows": round(load.num_rows, 3),
            "prompt_tokens_per_s": round(load.num_prompt_tokens / load.window_s, 3),
            "decode_tokens_per_s": round(load.num_decode_tokens / load.window_s, 3),
        },
        "waiting_for": {name: round(share, 4) for name, share in sorted(load.waiting_for.items())},
    }


def _stage(stage: StageStatus, load: WindowLoad) -> dict[str, Any]:
    name = stage.name
    busy, blocked = load.busy.get(name, 0.0), load.blocked.get(name, 0.0)
    return {
        "name": name,
        "busy": round(busy, 4),
        "blocked": round(blocked, 4),
        "idle": round(1.0 - busy - blocked, 4),
        "is_busy": stage.is_busy,
        "restarts": stage.num_restarts,
    }


def _edge(edge: Edge, load: WindowLoad, pipeline: PipelineStatus) -> dict[str, Any]:
    channel = pipeline.channels[edge.name]
    stats = channel.stats
    return {
        "name": edge.name,
        "from": edge.source.stage,
        "to": edge.target.stage,
        "depth": stats.depth,
        "capacity": stats.capacity,
        "high_water": stats.high_water,
        "sent": stats.num_sent,
        "full": round(load.full.get(channel.name, 0.0), 4),  # in the trace; a stage of one's own may have its end
        "senders_waiting": channel.num_waiting,
    }


# -- running requests


def requests_report(
    engine: Engine, live: Mapping[str, ActiveRequest], cursor: int = 0, limit: int = MAX_LISTED
) -> tuple[list[dict[str, Any]], int | None]:
    """(the first `limit` requests of `live` with a number of at least `cursor`, cursor of the next page or None).

    The rows have no text. A request's number is its first sequence id, which increases with each request.
    """
    exit, now_s = engine.pipeline.exit, engine.pipeline.env.now()
    assert exit is not None
    found = [(outbox, one) for name, one in live.items() if (outbox := exit.live.get(name)) is not None]
    found = [pair for pair in found if pair[0].request.first_sequence_id >= cursor]
    found.sort(key=lambda pair: pair[0].request.first_sequence_id)
    rows, status = [], engine.status(with_sequences=True)
    for outbox, one in found[:limit]:
        stage, _ = exit.locate(outbox)  # type: ignore[attr-defined]
        rows.append(_request(status, one, outbox, stage, now_s))
    return rows, found[limit][0].request.first_sequence_id if len(found) > limit else None


def _request(status: EngineStatus, live: ActiveRequest, outbox: Any, stage: str, now_s: float) -> dict[str, Any]:
    request = outbox.request
    num_sequences = request.num_sequences
    sequences = status.sequences_of(request.first_sequence_id, num_sequences)
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
        "num_blocks": status.num_blocks_of(slots),
        "preemptions": sum(sequence.num_preempted for sequence in sequences),
    }
