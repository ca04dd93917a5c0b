"""`GET /openapi.json`. With API keys it needs one. `GET /docs`, a page of `server`, shows the same document."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

import orjson
from aiohttp import web

from ..api.schema.hints import ModelLimits
from ..api.service import Service


class DocumentRoutes:
    """The handler of one server. The document is made on the first request."""

    def __init__(self, service: Service, threads: Executor, version: str) -> None:
        self.service = service
        self._threads = threads
        self._version = version
        self._made: tuple[ModelLimits | None, bytes] | None = None

    def table(self) -> list[web.RouteDef]:
        """All routes; none with `disable_docs`."""
        if self.service.config.disable_docs:
            return []
        return [web.get("/openapi.json", self.document)]

    async def document(self, request: web.Request) -> web.Response:
        """`GET /openapi.json`."""
        return web.Response(body=await self._make(), content_type="application/json")

    async def _make(self) -> bytes:
        """The document for the current model. Made in a thread, once, as it takes 0.2 s."""
        limits = self._limits()
        if self._made is None or self._made[0] != limits:
            loop = asyncio.get_running_loop()
            self._made = limits, await loop.run_in_executor(self._threads, self._render, limits)
        return self._made[1]

    def _render(self, limits: ModelLimits | None) -> bytes:
        from .document import openapi  # imports the models of all answers, which only the document needs

        return orjson.dumps(openapi(self.service.config, self._version, limits))

    def _limits(self) -> ModelLimits | None:
        engine = self.service.engine
        if engine is None:
            return None
        info = engine.info
        return ModelLimits(
            info.vocab_size, info.max_model_len, (*self.service.model_names, *self.service.adapter_names)
        )
