"""LoRA adapters loaded and unloaded while the server runs. The paths and texts below /v1 are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

from aiohttp import web

from ...stages.adapters.registry import AdapterEntry, name_problem
from ...stages.errors import ErrorText, Refused, RequestError, field_text
from ..api.schema.body import Body
from ..api.service import Service
from ..errors import ApiError, describe
from ..http.body_reader import read
from ..http.responses import answer

MAX_TIMEOUT_S = 3_600.0  # that a removal waits for requests
# the engine's names of fields -> those of each route, for error texts
LOADED = {"model": "lora_path"}
ADDED = {"model": "path", "lora_path": "path", "lora_name": "name", "load_inplace": "replace"}
PINNED = {"model": "name"}


class LoadAdapterBody(Body):
    """The body of `POST /v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False

    def check(self) -> None:
        super().check()
        if not self.lora_name or not self.lora_path:
            raise ApiError("invalid_value", "lora_name and lora_path must not be empty", param="lora_name")
        if problem := name_problem(self.lora_name):
            raise ApiError("invalid_value", f"lora_name = {self.lora_name[:64]!r}: {problem}", param="lora_name")


class AddAdapterBody(Body):
    """The body of `POST /admin/adapters`."""

    name: str
    path: str
    replace: bool = False  # of a name in use

    def check(self) -> None:
        super().check()
        if problem := name_problem(self.name):
            raise ApiError("invalid_value", f"name = {self.name[:64]!r}: {problem}", param="name")


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
        self.service.require_adapters()
        body = await read(request, self.service.config, self._threads, self._load_body)
        await self._load(body.lora_name, body.lora_path, body.load_inplace, LOADED)
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def add(self, request: web.Request) -> web.Response:
        """`POST /admin/adapters`: as `load`, and answers what `GET` tells of the adapter."""
        adapters = self.service.require_adapters()
        body = await read(request, self.service.config, self._threads, self._add_body)
        await self._load(body.name, body.path, body.replace, ADDED)
        return answer(self._state(adapters.require(body.name), self._places()))

    async def remove(self, request: web.Request) -> web.Response:
        """`DELETE /admin/adapters/{name}`: the name is gone at once.

        Answers when its requests have ended, at the latest after `timeout_s`; with `force` those left are ended then.
        """
        self.service.require_adapters()
        name, timeout_s = request.match_info["name"], _timeout(request.query.get("timeout_s"))
        is_forced = request.query.get("force", "false").lower() in ("true", "1")
        left = await self.service.require_engine().remove_adapter(name, timeout_s, force=is_forced)
        if left is None:
            raise ApiError("not_found", f"no adapter has the name {name[:64]!r}; GET /admin/adapters lists them")
        return answer({"name": name, "in_progress": 0 if is_forced else left, "ended": left if is_forced else 0})

    async def pin(self, request: web.Request) -> web.Response:
        """`POST /admin/adapters/{name}/pin`: loads the adapter and keeps it, `where` = `device` or only `host`."""
        adapters, engine, name = self.service.require_adapters(), self.service.require_engine(), _name(request)
        where = request.query.get("where", "device")
        if where not in ("host", "device"):
            raise ApiError("invalid_value", f"where = {where[:64]!r}: must be host or device", param="where")
        try:
            await engine.pin_adapter(name, on_device=where == "device")
            return answer(self._state(adapters.require(name), self._places()))
        except RequestError as error:
            raise _known(error, PINNED) from error

    async def unpin(self, request: web.Request) -> web.Response:
        """`POST /admin/adapters/{name}/unpin`: the adapter may be evicted, and lose its slot, from now on."""
        adapters, engine, name = self.service.require_adapters(), self.service.require_engine(), _name(request)
        try:
            engine.unpin_adapter(name)
            return answer(self._state(adapters.require(name), self._places()))
        except RequestError as error:
            raise _known(error, PINNED) from error

    async def _load(self, name: str, path: str, replaces: bool, names: Mapping[str, str]) -> None:
        """Loads an adapter. Errors have the route's `names` of fields."""
        adapters, engine = self.service.require_adapters(), self.service.require_engine()
        try:
            if name in self.service.model_names:
                raise Refused(field_text("lora_name", "is the model's own name", repr(name[:64])))
            if not replaces and name in adapters:
                problem = ErrorText(("is in use; set ", "load_inplace", " to replace it"))
                raise Refused(field_text("lora_name", problem, repr(name[:64])))
            await engine.load_adapter(name, adapters.path_of(path, name))
        except RequestError as error:
            raise _known(error, names) from error

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
        adapters = self.service.require_adapters()
        await self.service.require_engine().refresh()
        places = self._places()
        return answer({"adapters": [self._state(entry, places) for entry in adapters]})

    def _places(self) -> tuple[Mapping[str, int], Mapping[str, tuple[str, int]]]:
        """By digest: the requests that use it on the host; the state of its device slot, and the sequences there."""
        status = self.service.require_engine().status()
        host, core = status.front.adapters, status.core
        slots = () if core is None or core.scheduler.adapters is None else core.scheduler.adapters.slots
        on_device = {digest: (state, num_running) for state, digest, num_running in slots if digest}
        return {} if host is None else host.num_users, on_device

    def _state(
        self, entry: AdapterEntry, places: tuple[Mapping[str, int], Mapping[str, tuple[str, int]]]
    ) -> dict[str, Any]:
        num_users, slot = places[0], places[1].get(entry.digest)
        return {
            "name": entry.name,
            "path": str(entry.path),
            "state": "on_disk" if entry.digest not in num_users else "on_host" if slot is None else slot[0],
            "digest": entry.digest or None,
            "parent": entry.parent,
            "rank": entry.rank,
            "bytes": entry.num_bytes,
            "requests": entry.num_uses,
            "pinned": entry.pin,
            "in_progress": num_users.get(entry.digest, 0),
            "running": 0 if slot is None else slot[1],
            "load_s": round(entry.load_s, 4),
            "last_error": entry.error or None,
        }

    def _add_body(self, raw: Mapping[str, Any]) -> AddAdapterBody:
        return self.service.read_body(AddAdapterBody, raw)[0]

    def _load_body(self, raw: Mapping[str, Any]) -> LoadAdapterBody:
        return self.service.read_body(LoadAdapterBody, raw)[0]

    def _unload_body(self, raw: Mapping[str, Any]) -> UnloadAdapterBody:
        return self.service.read_body(UnloadAdapterBody, raw)[0]


def _name(request: web.Request) -> str:
    return request.match_info["name"]


def _known(error: RequestError, names: Mapping[str, str]) -> ApiError:
    """The error for the client, with its names of fields."""
    found = describe(error)
    assert found is not None
    return found.named(lambda name: names.get(name, name))


def _timeout(text: str | None) -> float:
    try:
        seconds = 0.0 if text is None else float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= MAX_TIMEOUT_S:
        message = f"timeout_s must be a number from 0 to {MAX_TIMEOUT_S:g}"
        raise ApiError("invalid_value", message, param="timeout_s")
    return seconds
