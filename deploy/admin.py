"""The admin routes: what changes the server for everybody. They are there only where there is an admin key.

Each asks for that key, and for no other; so whoever has only the API key can not use them.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ..runtime.log import get_logger
from .routes import answer, expect
from .service import Service

log = get_logger("millrace.deploy")


class Admin:
    """The handlers of one server."""

    def __init__(self, service: Service) -> None:
        self.service = service

    @property
    def handlers(self) -> frozenset[Any]:
        """Those that ask for the admin key: all."""
        return frozenset(route.handler for route in self.table())

    def table(self) -> list[web.RouteDef]:
        """All routes; none without an admin key, so that they answer as any path that is not there."""
        if not self.service.config.admin_key:
            return []
        return [web.post("/admin/cache/reset", self.reset_cache, expect_handler=expect)]

    async def reset_cache(self, request: web.Request) -> web.Response:
        """Forgets every cached prefix. Requests under way keep their blocks and go on."""
        freed = self.service.require_engine().reset_prefix_cache()
        log.info("cache.reset", freed_blocks=freed)
        return answer({"freed_blocks": freed})
