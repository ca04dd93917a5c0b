"""`GET /v1/models`: the names under which the model is served."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ...http.responses import answer
from ..service import Service


class ModelRoutes:
    """The handlers of `GET /v1/models`."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def models(self, request: web.Request) -> web.Response:
        """`GET /v1/models`: all served names."""
        self.service.require_engine()
        return answer({"object": "list", "data": [self._model(name) for name in self.service.model_names]})

    async def model(self, request: web.Request) -> web.Response:
        """`GET /v1/models/{id}`: one served name."""
        self.service.require_engine()
        name = request.match_info["id"]
        self.service.require_model(name)
        return answer(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        engine = self.service.require_engine()
        return {
            "id": name,
            "object": "model",
            "created": self.service.created,
            "owned_by": "millrace",
            "root": self.service.model_names[0],
            "parent": None,
            "max_model_len": engine.info.max_model_len,
            "permission": [],
        }
