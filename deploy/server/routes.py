"""The routing table of the public routes."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any

from aiohttp import web

from ..api.dialects.routes import DialectRoutes
from ..api.dialects.tgi import TGI_STREAM_PATH
from ..api.messages.events import MESSAGES_PATH
from ..api.messages.routes import MessagesRoutes
from ..api.ollama.embeddings import OllamaEmbeddings
from ..api.ollama.model_routes import CHANGES, OllamaModelRoutes
from ..api.ollama.routes import OllamaRoutes
from ..api.openai.embeddings import EmbeddingRoutes
from ..api.openai.generation import GenerationRoutes
from ..api.openai.models import ModelRoutes
from ..api.openai.tokenize import TokenizeRoutes
from ..api.responses.routes import ResponsesRoutes
from ..api.responses.service import ResponseService
from ..api.service import Service
from ..dashboard.feed import Feed
from ..http.package_version import package_version
from ..http.responses import expect
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
        self._tokenize = TokenizeRoutes(service, threads)
        self._generation = GenerationRoutes(service, threads)
        self._pages = Pages()
        self._embeddings = EmbeddingRoutes(service, threads)
        self.responses = ResponseService(self._generation, threads)
        self._response_routes = ResponsesRoutes(self.responses, threads)
        self._messages = MessagesRoutes(self._generation, threads)
        self._dialects = DialectRoutes(self._generation, threads)
        self._ollama = OllamaRoutes(self._generation, threads)
        self._ollama_models = OllamaModelRoutes(service, threads)
        self._ollama_embeddings = OllamaEmbeddings(self._embeddings)
        self.sockets = Hub(self._generation, self.responses, metrics, threads)
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
        return frozenset(posts - {self._response_routes.cancel} | {self.sockets.responses})

    @property
    def open_ended(self) -> frozenset[Any]:
        """Handlers of sockets, which last until one side closes them."""
        return frozenset({self.sockets.stream, self.sockets.responses, self.feed.socket})

    def table(self) -> list[web.RouteDef]:
        """The routes of these handlers."""
        generation, messages, embeddings = self._generation, self._messages, self._embeddings
        health, models, tokenize = self._health, self._models, self._tokenize
        responses = self._response_routes
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
            web.post("/v1/chat/completions", generation.chat, expect_handler=expect),
            web.post("/v1/completions", generation.completions, expect_handler=expect),
            web.post("/v1/embeddings", embeddings.embeddings, expect_handler=expect),
            *(web.post(path, embeddings.score, expect_handler=expect) for path in ("/score", "/v1/score")),
            *(
                web.post(path, embeddings.rerank, expect_handler=expect)
                for path in ("/rerank", "/v1/rerank", "/v2/rerank")
            ),
            web.post("/v1/responses", responses.create, expect_handler=expect),
            web.get("/v1/responses", self.sockets.responses, allow_head=False),
            web.get("/v1/responses/{id}", responses.retrieve),
            web.delete("/v1/responses/{id}", responses.delete),
            web.post("/v1/responses/{id}/cancel", responses.cancel),
            web.get("/v1/responses/{id}/input_items", responses.input_items),
            web.post(MESSAGES_PATH, messages.create, expect_handler=expect),
            web.post(f"{MESSAGES_PATH}/count_tokens", messages.count_tokens, expect_handler=expect),
            *self._ollama_table(),
            web.get("/v1/stream", self.sockets.stream, allow_head=False),
            web.get("/stream-demo", self._pages.stream_demo),
            *([] if self._service.config.disable_docs else [web.get("/docs", self._pages.docs)]),
            *(web.get(path, self._pages.dashboard) for path in ("/", "/dashboard")),
            web.get("/dashboard/feed", self.feed.socket, allow_head=False),
            web.get("/static/{name:(?s:.+)}", self._pages.file),
            web.post("/v1/chat/completions/render", generation.render_chat, expect_handler=expect),
            web.post("/v1/completions/render", generation.render_completions, expect_handler=expect),
            web.post("/generate", self._dialects.generate, expect_handler=expect),
            web.post(TGI_STREAM_PATH, self._dialects.generate_stream, expect_handler=expect),
            web.get("/info", self._dialects.info),
            web.post("/inference/v1/generate", generation.generate, expect_handler=expect),
            web.post("/tokenize", tokenize.tokenize, expect_handler=expect),
            web.post("/detokenize", tokenize.detokenize, expect_handler=expect),
            web.delete("/v1/requests/{id:(?!.+/explain$).+}", generation.abort),  # `inspect` has `explain`
        ]

    def _ollama_table(self) -> list[web.RouteDef]:
        """The routes below `/api`."""
        models, embeddings = self._ollama_models, self._ollama_embeddings
        posts = {
            "chat": self._ollama.chat,
            "generate": self._ollama.generate,
            "embed": embeddings.embed,
            "embeddings": embeddings.embeddings,
            "show": models.show,
            "pull": models.pull,
        }
        return [
            *(web.post(f"/api/{name}", handler, expect_handler=expect) for name, handler in posts.items()),
            web.get("/api/tags", models.tags),
            web.get("/api/ps", models.ps),
            web.get("/api/version", models.version),
            *(web.route("DELETE" if path.endswith("delete") else "POST", path, models.refuse) for path in CHANGES),
        ]

    async def stop(self, app: web.Application) -> None:
        """Ends background work that no handler waits for."""
        await self.responses.stop()
