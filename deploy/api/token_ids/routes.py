"""The HTTP handler of `/inference/v1/generate`. `/generate` is in `dialects`, as its body may have another form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from ..openai.api_routes import ApiRoutes, post
from .body import GenerateBody, TokenIdsAnswerBuilder

if TYPE_CHECKING:
    from ..schema.operation import Operation


class TokenIdsRoutes(ApiRoutes):
    """The handler."""

    def table(self) -> list[web.RouteDef]:
        return [post("/inference/v1/generate", self.create)]

    @staticmethod
    def operations() -> Sequence[Operation]:
        from .operations import OPERATIONS

        return OPERATIONS

    async def create(self, request: web.Request) -> web.StreamResponse:
        """`POST /inference/v1/generate`."""
        return await self._generation.generate(request, GenerateBody, TokenIdsAnswerBuilder)
