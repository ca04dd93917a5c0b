"""The admin routes: what changes the server for everybody. They are there only where there is an admin key.

Each asks for that key, and for no other; so whoever has only the API key can not use them.
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
from .profiler import Profiler

DEFAULT_TRACE_S, MAX_TRACE_S = 30.0, 3_600.0  # what there is goes back less far on a busy server

log = get_logger("millrace.deploy")


class Admin:
    """The handlers of one server."""

    def __init__(self, service: Service, threads: Executor) -> None:
        self.service = service
        self.profiler = Profiler(service)
        self._threads = threads

    @property
    def handlers(self) -> frozenset[Any]:
        """Those that ask for the admin key: all."""
        return frozenset(route.handler for route in self.table())

    def table(self) -> list[web.RouteDef]:
        """All routes; none without an admin key, so that they answer as any path that is not there."""
        if not self.service.config.admin_key:
            return []
        return [
            web.post("/admin/cache/reset", self.reset_cache, expect_handler=expect),
            web.get("/admin/trace", self.trace),
            web.post("/admin/flight", self.record_flight, expect_handler=expect),
            web.post("/admin/profiler/start", self.profiler.start, expect_handler=expect),
            web.post("/admin/profiler/stop", self.profiler.stop, expect_handler=expect),
        ]

    async def reset_cache(self, request: web.Request) -> web.Response:
        """Forgets every cached prefix. Requests under way keep their blocks and go on."""
        freed = await self.service.require_engine().forget_prefixes()
        log.info("cache.reset", freed_blocks=freed)
        return answer({"freed_blocks": freed})

    async def record_flight(self, request: web.Request) -> web.Response:
        """Writes a flight file, as a stall or a crash would."""
        oversight = self.service.oversight
        if oversight.recorder is None:
            message = "there is no folder for flight files: start the server with --flight-recorder-dir"
            raise ApiError("no_flight_recorder", message)
        self.service.require_some_engine()
        written = oversight.record("asked")
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
