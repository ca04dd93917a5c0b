"""The routing table of the public routes."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any

from aiohttp import web

from ..api.openai.api_routes import ApiParts
from ..api.openai.generation import Generation
from ..api.openai.models import ModelRoutes
from ..api.responses.routes import ResponsesRoutes
from ..api.routes import table
from ..api.service import Service
from ..dashboard.feed import Feed
from ..errors import ApiError, shorten
from ..http.package_version import package_version
from ..http.request_context import OWNER
from ..http.responses import answer
from ..metrics.metrics import Metrics
from ..websocket.hub import Hub
from .health import HealthRoutes
from .pages import Pages

# names that other servers, Kubernetes and gateways have for the two health routes
LIVE = ("/livez", "/v2/health/live")
READY = ("/ping", "/healthz", "/readyz", "/v2/health/ready")


class Routes:
    """Creates the handlers of one server and maps paths to them.

    `inspect`, `admin` and `openapi` have their own.
    """

    def __init__(self, service: Service, metrics: Metrics, threads: Executor) -> None:
        self._service = service
        self._health = HealthRoutes(service, metrics)
        self._models = ModelRoutes(service)
        self._pages = Pages()
        generation = Generation(service, threads)
        parts = ApiParts(service, threads, generation)
        self._api = [kind(parts) for kind in table.API_ROUTES]
        (self._responses,) = [routes for routes in self._api if isinstance(routes, ResponsesRoutes)]
        self.responses = self._responses.responses
        self.sockets = Hub(generation, self.responses, metrics, threads)
        self.feed = Feed(service, metrics, threads, package_version())

    @property
    def public(self) -> frozenset[Any]:
        """Handlers that require no key."""
        health, pages = self._health, self._pages
        return frozenset(
            {health.live, health.ready, pages.stream_demo, pages.docs, pages.dashboard, self.feed.socket, pages.file}
        )

    @property
    def probes(self) -> frozenset[Any]:
        """Handlers for which a full server keeps a few connections."""
        return frozenset({self._health.live, self._health.ready})

    @property
    def new_work(self) -> frozenset[Any]:
        """Handlers that start something, and so are refused while the server drains; `/v1/stream` decides itself."""
        posts = {route.handler for route in self.table() if route.method == "POST"}
        return frozenset(posts - {self._responses.cancel} | {self.sockets.responses})

    @property
    def open_ended(self) -> frozenset[Any]:
        """Handlers of sockets, which last until one side closes them."""
        return frozenset({self.sockets.stream, self.sockets.responses, self.feed.socket})

    def table(self) -> list[web.RouteDef]:
        """The routes of these handlers."""
        health, models = self._health, self._models
        return [
            web.get("/health", health.ready),
            web.get("/health/live", health.live),
            web.get("/health/ready", health.ready),
            *(web.get(path, health.live) for path in LIVE),
            *(web.get(path, health.ready) for path in READY),
            web.get("/version", health.version),
            web.get("/server_info", health.server_info),
            web.get("/load", health.load),
            web.get("/metrics", health.metrics),
            web.get("/v1/models", models.models),
            web.get("/v1/models/{id:(?s:.+)}", models.model),
            *(route for routes in self._api for route in routes.table()),
            web.get("/v1/responses", self.sockets.responses, allow_head=False),
            web.get("/v1/stream", self.sockets.stream, allow_head=False),
            web.get("/stream-demo", self._pages.stream_demo),
            *([] if self._service.config.disable_docs else [web.get("/docs", self._pages.docs)]),
            *(web.get(path, self._pages.dashboard) for path in ("/", "/dashboard")),
            web.get("/dashboard/feed", self.feed.socket, allow_head=False),
            web.get("/static/{name:(?s:.+)}", self._pages.file),
            web.delete("/v1/requests/{id:(?!.+/explain$).+}", self.abort),  # `inspect` has `explain`
        ]

    async def abort(self, request: web.Request) -> web.Response:
        """`DELETE /v1/requests/{id}`: aborts a request.

        Its client gets the partial answer, finish_reason `abort`.
        """
        some_id = request.match_info["id"]
        if self._service.abort(some_id, request[OWNER]) is None:
            message = f"id = {shorten(repr(some_id), 128)}: no request with this id is in progress"
            raise ApiError("request_not_found", message, param="id")
        return answer({"id": some_id, "aborted": True})

    async def stop(self, app: web.Application) -> None:
        """Ends background work that no handler waits for."""
        await self.responses.stop()
