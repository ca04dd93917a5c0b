"""The admin routes: what changes the server for everybody. They are there only where there is an admin key.

Each asks for that key, and for no other; so whoever has only the API key can not use them.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ..runtime.log import get_logger
from .errors import ApiError
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
        return [
            web.post("/admin/cache/reset", self.reset_cache, expect_handler=expect),
            web.post("/admin/flight", self.record_flight, expect_handler=expect),
        ]

    async def reset_cache(self, request: web.Request) -> web.Response:
        """Forgets every cached prefix. Requests under way keep their blocks and go on."""
        freed = self.service.require_engine().reset_prefix_cache()
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
