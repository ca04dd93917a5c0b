"""LoRA adapters loaded and unloaded while the server runs, with the admin key; the paths and texts are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

from aiohttp import web

from ...stages.adapters.registry import AdapterEntry, name_problem
from ...stages.errors import RequestError
from ..api.schema.body import Body
from ..api.schema.validation import read_body
from ..api.service import Service
from ..errors import ApiError, describe
from ..http.body_reader import read
from ..http.responses import answer


class LoadAdapterBody(Body):
    """The body of `POST /v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False

    def check(self) -> None:
        if not self.lora_name or not self.lora_path:
            raise ApiError("invalid_value", "lora_name and lora_path must not be empty", param="lora_name")
        if problem := name_problem(self.lora_name):
            raise ApiError("invalid_value", f"lora_name = {self.lora_name[:64]!r}: {problem}", param="lora_name")


class UnloadAdapterBody(Body):
    """The body of `POST /v1/unload_lora_adapter`."""

    lora_name: str


class AdapterAdminRoutes:
    """The handlers of one server."""

    def __init__(self, service: Service, threads: Executor) -> None:
        self.service = service
        self._threads = threads

    async def load(self, request: web.Request) -> web.Response:
        """`POST /v1/load_lora_adapter`: answers once requests may name the adapter.

        `lora_path` is a folder in the server's `--lora-dir`. A name in use is replaced with `load_inplace` only.
        """
        adapters, engine = self.service.require_adapters(), self.service.require_engine()
        body = await read(request, self.service.config, self._threads, self._load_body)
        name = body.lora_name
        if name in self.service.model_names:
            raise ApiError("invalid_value", f"lora_name = {name[:64]!r}: is the model's own name", param="lora_name")
        if name in adapters.registry and not body.load_inplace:
            message = f"lora_name = {name[:64]!r}: is in use; set load_inplace to replace it"
            raise ApiError("invalid_value", message, param="lora_name")
        try:
            await engine.load_adapter(name, adapters.registry.path_of(body.lora_path))
        except RequestError as error:
            known_error = describe(error)
            assert known_error is not None
            raise known_error from error
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: web.Request) -> web.Response:
        """`POST /v1/unload_lora_adapter`: the name is gone at once; requests in progress end as they would."""
        self.service.require_adapters()
        body = await read(request, self.service.config, self._threads, self._unload_body)
        if not self.service.require_engine().unload_adapter(body.lora_name):
            message = f"lora_name = {body.lora_name[:64]!r}: no adapter of that name; GET /v1/models lists them"
            raise ApiError("not_found", message, param="lora_name")
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def adapters(self, request: web.Request) -> web.Response:
        """`GET /admin/adapters`: every adapter with what it takes, who uses it and where it is."""
        gate = self.service.require_adapters()
        await self.service.require_engine().refresh()
        return answer({"adapters": [self._state(entry) for entry in gate.registry]})

    def _state(self, entry: AdapterEntry) -> dict[str, Any]:
        gate, lines = self.service.require_adapters(), self.service.require_engine().scheduler.adapters
        slot = None if lines is None or not entry.digest else lines.slots.of(entry.digest)
        return {
            "name": entry.name,
            "path": str(entry.path),
            "state": "on_disk" if entry.digest not in gate.store else "on_host" if slot is None else slot.state.value,
            "digest": entry.digest or None,
            "parent": entry.parent,
            "rank": entry.rank,
            "bytes": entry.num_bytes,
            "requests": entry.num_uses,
            "in_progress": gate.store.num_users(entry.digest) if entry.digest else 0,
            "running": 0 if slot is None else slot.num_running,
            "load_s": round(entry.load_s, 4),
            "last_error": entry.error or None,
        }

    def _load_body(self, raw: Mapping[str, Any]) -> LoadAdapterBody:
        return read_body(LoadAdapterBody, raw, self.service.config.strict_fields)[0]

    def _unload_body(self, raw: Mapping[str, Any]) -> UnloadAdapterBody:
        return read_body(UnloadAdapterBody, raw, self.service.config.strict_fields)[0]
