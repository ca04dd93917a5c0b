"""The pages of `millrace engine`: `/health` and `/metrics`, without any request of users."""

from __future__ import annotations

from collections.abc import Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric

from ....stages.machines.engine_server import MAX_FRONTS, EngineServer
from ...config import ServerConfig
from ...errors import ApiError
from ...http.listener import ServerRunner, Site
from ...http.listening import ListeningSockets
from ...http.query_params import whole_number
from ...metrics.families import counter, gauge, label_labels

MAX_CONNECTIONS = 64  # of probes and scrapes; a full server still answers /health


class EnginePages:
    """Serves the pages of one engine on a port of its own. Call `start`, in the end `aclose`.

    Connections have the limits of the API's server: their number, and the time for headers and between requests.
    """

    def __init__(self, engine: EngineServer, host: str, port: int) -> None:
        self._engine, self._host = engine, host
        self._config = ServerConfig(host=host, port=port, allow_no_key=True, max_connections=MAX_CONNECTIONS)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/health/ready", self._health)
        app.router.add_get("/health/live", self._live)
        app.router.add_get("/metrics", self._metrics)
        self._runner = ServerRunner(app, self._config, ["/health", "/health/ready", "/health/live"])
        self.url = ""
        self.takes_fronts = True  # False: the engine is ready, and does not listen yet

    async def start(self) -> None:
        """Listens. Raises `ConfigError` if the port cannot be used."""
        listening = ListeningSockets.open(self._config, flags=("--listen", "--metrics-port"))
        await self._runner.setup()
        await Site(self._runner, listening, self._config, None).start()
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http://{host}:{listening.port}"

    async def aclose(self) -> None:
        """Stops listening. Idempotent."""
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        """200 while fronts may connect; 503 while the model loads, and from the drain on.

        With `?fronts=N`, also 503 while fewer are connected: so the next engine is not replaced before that.
        """
        engine = self._engine
        status: str = self._state
        try:
            wanted = whole_number(request, "fronts", 0, least=0, most=MAX_FRONTS)
        except ApiError as error:
            return web.json_response(error.body(), status=error.status)
        if status == "ready" and engine.num_fronts < wanted:
            status = "alone" if not engine.num_fronts else "waiting"
        body: dict[str, object] = {"status": status, "fronts": engine.num_fronts, "requests": engine.num_live}
        if engine.labels:
            body["labels"] = dict(engine.labels)
        if status != "ready":
            few = f"fronts that are connected: {engine.num_fronts}; asked for: {wanted}"
            body["reason"] = engine.reason or (few if self.takes_fronts else "the first requests run")
        return web.json_response(body, status=200 if status == "ready" else 503)

    @property
    def _state(self) -> str:
        """The engine's, but loading until fronts may connect."""
        return "loading" if self._engine.state == "ready" and not self.takes_fronts else self._engine.state

    async def _live(self, request: web.Request) -> web.Response:
        """503 for an engine that only a restart helps."""
        is_dead = self._engine.state == "dead"
        return web.json_response({"status": "dead" if is_dead else "alive"}, status=503 if is_dead else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus-client at each scrape."""
        engine = self._engine
        yield gauge("millrace:engine_ready", "1 while fronts may connect.", float(self._state == "ready"), {})
        text = "What the operator says of the engine, as labels; the value is 1."
        yield gauge("millrace:engine_labels", text, 1.0, label_labels(engine.labels))
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
