"""The HTTP handlers of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from ..openai.api_routes import ApiRoutes, post
from .answers import CompletionAnswerBuilder
from .body import CompletionBody

if TYPE_CHECKING:
    from ..schema.operation import Operation


class CompletionRoutes(ApiRoutes):
    """The handlers."""

    def table(self) -> list[web.RouteDef]:
        return [post("/v1/completions", self.create), post("/v1/completions/render", self.render)]

    @staticmethod
    def operations() -> Sequence[Operation]:
        from .operations import OPERATIONS

        return OPERATIONS

    async def create(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        return await self._generation.generate(request, CompletionBody, CompletionAnswerBuilder)

    async def render(self, request: web.Request) -> web.Response:
        """`POST /v1/completions/render`."""
        return await self._generation.render(request, CompletionBody, CompletionAnswerBuilder)
