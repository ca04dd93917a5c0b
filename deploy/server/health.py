"""Handlers of the server's own state: health, version, settings, load and metrics."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ..api.service import Service
from ..http.package_version import package_version
from ..http.responses import answer
from ..inspect.server_info import load, server_info
from ..metrics.metrics import CONTENT_TYPE, Metrics


class HealthRoutes:
    """The handlers of one server; `Routes.table` has their paths."""

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self.service = service
        self._metrics = metrics

    async def live(self, request: web.Request) -> web.Response:
        """`GET /health/live`: 200, except for a server that is dead: only a restart helps it, so it answers 503."""
        health = self.service.health
        if health.state == "dead":
            return answer({"status": "dead", "stage": health.stage, "reason": health.reason}, status=503)
        return answer({"status": "alive"})

    async def ready(self, request: web.Request) -> web.Response:
        """`GET /health/ready`: 200 if requests are accepted, also while engines are missing; else 503."""
        health = self.service.health
        if health.is_ready:
            return answer(_ready(self.service))
        body: dict[str, Any] = {"status": health.state, "stage": health.stage, "reason": health.reason}
        state = self.service.load_state if health.state == "loading" else None
        if state is not None:
            files = {name: {"num_bytes": done, "total_bytes": total} for name, (done, total) in state.files.items()}
            body["progress"] = state.to_json() | {"files": files}
        return answer(body, status=503)

    async def version(self, request: web.Request) -> web.Response:
        """`GET /version`."""
        return answer({"version": package_version()})

    async def server_info(self, request: web.Request) -> web.Response:
        """`GET /server_info`: model, settings, memory table and startup times."""
        engine = self.service.require_engine()
        await engine.refresh()
        return answer(server_info(engine, self.service, package_version()))

    async def load(self, request: web.Request) -> web.Response:
        """`GET /load`: numbers of running and waiting requests."""
        engine = self.service.require_engine()
        await engine.refresh()
        return answer(load(engine, len(self.service.live)))

    async def metrics(self, request: web.Request) -> web.Response:
        """`GET /metrics`: metrics in Prometheus' text format."""
        if self.service.engine is not None:
            await self.service.engine.refresh()
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})


def _ready(service: Service) -> dict[str, Any]:
    """`ready`; or `degraded`, with the engines of a fleet that do not serve."""
    engines = [] if service.engine is None else service.engine.engines
    missing = [{key: one[key] for key in ("index", "state", "reason")} for one in engines if one["state"] != "ready"]
    if not missing:
        return {"status": "ready"}
    which = "; ".join(f"engine {one['index']} is {one['state']}: {one['reason']}" for one in missing)
    return {"status": "degraded", "reason": f"of {len(engines)} engines {which}", "missing_engines": missing}
