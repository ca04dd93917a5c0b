"""Handlers of the server's own state: health, version, settings, load and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from ..api.service import Service
from ..http.api_keys import ApiKeys
from ..http.package_version import package_version
from ..http.responses import answer
from ..inspect.server_info import load, server_info
from ..metrics.metrics import CONTENT_TYPE, Metrics

REASONS = {"loading": "it is not reached", "dead": "it was given up"}  # of engines elsewhere, by state, for clients


class HealthRoutes:
    """The handlers of one server; `Routes.table` has their paths."""

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self.service = service
        self._metrics = metrics
        self._operators = ApiKeys(service.config.admin_key, "admin key")

    async def live(self, request: web.Request) -> web.Response:
        """`GET /health/live`: 200, except for a server that is dead: only a restart helps it, so it answers 503."""
        health = self.service.health
        if health.state == "dead":
            return answer({"status": "dead", "stage": health.stage, "reason": health.reason}, status=503)
        return answer({"status": "alive"})

    async def ready(self, request: web.Request) -> web.Response:
        """`GET /health/ready`: 200 if requests are accepted, also while engines are missing; else 503.

        Addresses of engines and the settings of their connections are told with the admin key alone.
        """
        health, is_operator = self.service.health, self._operators.admits(request)
        if health.is_ready:
            return answer(_ready(self.service, is_operator))
        reason = health.full_reason if is_operator else health.reason
        body: dict[str, Any] = {"status": health.state, "stage": health.stage, "reason": reason}
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


def _ready(service: Service, is_operator: bool) -> dict[str, Any]:
    """`ready`; or `degraded`, with the engines of a fleet that do not serve."""
    engines = [] if service.engine is None else service.engine.engines
    missing = [_missing(one, is_operator) for one in engines if one["state"] != "ready"]
    if not missing:
        return {"status": "ready"}
    which = "; ".join(f"engine {one['index']} is {one['state']}: {one['reason']}" for one in missing)
    return {"status": "degraded", "reason": f"of {len(engines)} engines {which}", "missing_engines": missing}


def _missing(engine: Mapping[str, Any], is_operator: bool) -> dict[str, Any]:
    """An engine that does not serve, and why."""
    shown = {key: engine[key] for key in ("index", "state", "reason")}
    if engine.get("address") is not None and not is_operator:
        shown["reason"] = REASONS.get(shown["state"], shown["reason"])
    return shown
