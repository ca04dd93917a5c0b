"""The HTTP handlers of chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from ..openai.api_routes import ApiRoutes, post
from .answers import ChatAnswerBuilder
from .body import ChatBody

if TYPE_CHECKING:
    from ..schema.operation import Operation


class ChatRoutes(ApiRoutes):
    """The handlers."""

    def table(self) -> list[web.RouteDef]:
        return [post("/v1/chat/completions", self.create), post("/v1/chat/completions/render", self.render)]

    @staticmethod
    def operations() -> Sequence[Operation]:
        from .operations import OPERATIONS

        return OPERATIONS

    async def create(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        return await self._generation.generate(request, ChatBody, ChatAnswerBuilder)

    async def render(self, request: web.Request) -> web.Response:
        """`POST /v1/chat/completions/render`."""
        return await self._generation.render(request, ChatBody, ChatAnswerBuilder)
