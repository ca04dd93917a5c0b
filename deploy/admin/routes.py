"""The admin routes, which affect all clients: prefix cache, trace, flight recorder, profiler, files and adapters.

They exist only if an admin key is set, and accept only that key, never an API key. With `enable_runtime_lora`, vLLM's
routes for adapters always exist, and accept both.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from functools import partial
from typing import Any

import orjson
from aiohttp import web

from ...runtime.env.log import get_logger
from ...runtime.trace.perfetto import chrome_trace
from ...runtime.trace.tracer import Tracer
from ..api.service import Service
from ..errors import ApiError
from ..http.responses import answer, expect
from .adapters import AdapterAdminRoutes
from .files import FileRoutes
from .profiler import Profiler
from .traffic import TrafficRoutes

DRAIN_BY = ("", "finish", "migrate")
DEFAULT_TRACE_S, MAX_TRACE_S = 30.0, 3_600.0  # on a busy server the trace covers less

log = get_logger("millrace.deploy")


class AdminRoutes:
    """The handlers of one server."""

    def __init__(self, service: Service, threads: Executor) -> None:
        self.service = service
        self.profiler = Profiler(service)
        self.adapters = AdapterAdminRoutes(service, threads)
        self._files = FileRoutes(service, threads)
        self._traffic = TrafficRoutes(service, threads)
        self._threads = threads

    @property
    def handlers(self) -> frozenset[Any]:
        """The handlers that need the admin key: all but `runtime_handlers`."""
        return frozenset(route.handler for route in self.table()) - self.runtime_handlers

    @property
    def runtime_handlers(self) -> frozenset[Any]:
        """The handlers that take API keys, too."""
        is_open = self.service.config.has_open_runtime_lora
        return frozenset(route.handler for route in self._runtime_table()) if is_open else frozenset()

    def table(self) -> list[web.RouteDef]:
        """All routes; without an admin key none that needs it, so that their paths are 404."""
        config = self.service.config
        runtime = self._runtime_table() if config.admin_key or config.enable_runtime_lora else []
        return (self._admin_table() if config.admin_key else []) + runtime

    def _runtime_table(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/load_lora_adapter", self.adapters.load, expect_handler=expect),
            web.post("/v1/unload_lora_adapter", self.adapters.unload, expect_handler=expect),
        ]

    def _admin_table(self) -> list[web.RouteDef]:
        return [
            web.post("/admin/cache/reset", self.reset_cache, expect_handler=expect),
            web.get("/admin/trace", self.trace),
            web.post("/admin/flight", self.record_flight, expect_handler=expect),
            web.post("/admin/engines/{id}/drain", self.drain_engine, expect_handler=expect),
            web.get("/admin/traffic", self._traffic.traffic),
            web.post("/admin/traffic", self._traffic.change, expect_handler=expect),
            web.post("/admin/profiler/start", self.profiler.start, expect_handler=expect),
            web.post("/admin/profiler/stop", self.profiler.stop, expect_handler=expect),
            web.get("/admin/files", self._files.files),
            web.get("/admin/files/{name}", self._files.file),
            web.get("/admin/adapters", self.adapters.adapters),
            web.post("/admin/adapters", self.adapters.add, expect_handler=expect),
            web.post("/admin/adapters/{name:.+}/pin", self.adapters.pin, expect_handler=expect),
            web.post("/admin/adapters/{name:.+}/unpin", self.adapters.unpin, expect_handler=expect),
            web.delete("/admin/adapters/{name:.+}", self.adapters.remove, expect_handler=expect),
        ]

    async def reset_cache(self, request: web.Request) -> web.Response:
        """Clears the prefix cache. Running requests keep their blocks and continue."""
        freed = await self.service.require_engine().forget_prefixes()
        log.info("cache.reset", freed_blocks=freed)
        return answer({"freed_blocks": freed})

    async def drain_engine(self, request: web.Request) -> web.Response:
        """Gives an engine of a fleet, named by index or address, no new requests; it ends once it has none."""
        named, by = request.match_info["id"], request.query.get("by", "")
        if by not in DRAIN_BY:
            raise ApiError("invalid_value", f"by = {by}: must be finish or migrate", param="by")
        engine = self.service.require_some_engine()
        found = [one["index"] for one in engine.engines if named in (str(one["index"]), one["address"])]
        if not found:
            count = len(engine.engines)
            message = (
                f"engine {named}: must be the index or the address of one of the {count} engines in GET /server_info"
            )
            raise ApiError("not_found", message, param="id")
        engine.drain_engine(found[0], by)
        log.info("engine.drain_asked", engine=found[0], by=by)
        return answer(next(one for one in engine.engines if one["index"] == found[0]))

    async def record_flight(self, request: web.Request) -> web.Response:
        """Writes a flight file, as after a stall or a crash."""
        watchdog = self.service.watchdog
        if watchdog.recorder is None:
            message = "the flight recorder is off; start the server with --flight-recorder-dir"
            raise ApiError("no_flight_recorder", message)
        self.service.require_some_engine()
        written = watchdog.record("asked")
        return answer({"file": None if written is None else str(await written)})

    async def trace(self, request: web.Request) -> web.Response:
        """The last seconds of the trace, for ui.perfetto.dev."""
        seconds = _seconds(request.query.get("seconds"))
        pipeline = self.service.require_some_engine().pipeline
        make = partial(_perfetto, pipeline.tracer, pipeline.env.now_ns() - int(seconds * 1e9))
        body = await asyncio.get_running_loop().run_in_executor(self._threads, make)
        return web.Response(body=body, content_type="application/json")


def _seconds(text: str | None) -> float:
    try:
        seconds = DEFAULT_TRACE_S if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= MAX_TRACE_S:
        raise ApiError(
            "invalid_value", f"seconds must be a number above 0 and at most {MAX_TRACE_S:g}", param="seconds"
        )
    return seconds


def _perfetto(tracer: Tracer, since_ns: int) -> bytes:
    records = tracer.read_all()
    readers = tracer.readers()
    names = readers[0].names() if readers else [""]
    return orjson.dumps(chrome_trace(records[records["time_ns"] >= max(0, since_ns)], names))
