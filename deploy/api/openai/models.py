"""`GET /v1/models`: the names under which the model and its LoRA adapters are served."""

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
        names = (*self.service.model_names, *self.service.adapter_names)
        return answer({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: web.Request) -> web.Response:
        """`GET /v1/models/{id}`: one served name."""
        self.service.require_engine()
        name = request.match_info["id"]
        adapter = self.service.adapter_of(name)
        return answer(self._model(name if adapter is None else adapter.name))

    def _model(self, name: str) -> dict[str, Any]:
        engine = self.service.require_engine()
        base = self.service.model_names[0]
        adapter = None if name in self.service.model_names else self.service.require_adapters().require(name)
        return {
            "id": name,
            "object": "model",
            "created": self.service.created,
            "owned_by": "millrace",
            "root": base if adapter is None else adapter.path.name,
            "parent": None if adapter is None else base,
            "max_model_len": engine.info.max_model_len,
            "permission": [],
        }
