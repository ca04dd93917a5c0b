"""The pages of `millrace engine`: `/health` and `/metrics`, without any request of users."""

from __future__ import annotations

from collections.abc import Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric

from ....stages.machines.engine_server import EngineServer
from ...metrics.families import counter, gauge


class EnginePages:
    """Serves the pages of one engine on a port of its own. Call `start`, in the end `aclose`."""

    def __init__(self, engine: EngineServer, host: str, port: int) -> None:
        self._engine, self._host, self._port = engine, host, port
        self._registry = CollectorRegistry()
        self._registry.register(self)
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/health/live", self._live)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None)
        self.is_open = False
        self.url = ""

    async def start(self) -> None:
        """Listens. Raises OSError if the port cannot be used."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        self.is_open = True
        port = self._runner.addresses[0][1]
        self.url = f"http://[{self._host}]:{port}" if ":" in self._host else f"http://{self._host}:{port}"

    async def aclose(self) -> None:
        """Stops listening. Idempotent."""
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        """200 while fronts may connect; 503 while the model loads, and from the drain on."""
        engine = self._engine
        body: dict[str, object] = {"status": engine.state, "fronts": engine.num_fronts, "requests": engine.num_live}
        if engine.state != "ready":
            body["reason"] = engine.reason
        return web.json_response(body, status=200 if engine.state == "ready" else 503)

    async def _live(self, request: web.Request) -> web.Response:
        """503 for an engine that only a restart helps."""
        is_dead = self._engine.state == "dead"
        return web.json_response({"status": "dead" if is_dead else "alive"}, status=503 if is_dead else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus-client at each scrape."""
        engine = self._engine
        yield gauge("millrace:engine_ready", "1 while fronts may connect.", float(engine.state == "ready"), {})
        yield gauge("millrace:fronts", "Fronts that are connected.", engine.num_fronts, {})
        yield counter("millrace:fronts_gone", "Fronts whose link has ended.", engine.num_fronts_gone, {})
        yield gauge("millrace:engine_live_requests", "Requests of all fronts.", engine.num_live, {})
        if (report := engine.report_or_none()) is None:
            return
        scheduler, cache = report.core.scheduler, report.core.cache
        yield gauge("vllm:num_requests_running", "Running sequences.", scheduler.num_running, {})
        yield gauge("vllm:num_requests_waiting", "Waiting sequences.", scheduler.num_waiting, {})
        yield gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", cache.used_share, {})
        yield counter("vllm:num_preemptions", "Preemptions of sequences.", scheduler.num_preemptions, {})
        if (found := cache.prefixes) is not None:
            yield counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", found.num_queries, {})
            yield counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", found.num_hits, {})
