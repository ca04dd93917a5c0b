"""Errors of the routes of adapters: each names the fields as its own client sends them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from millrace.deploy.config import ServerConfig
from millrace.deploy.server.server import Server
from millrace.stages.adapters.registry import AdapterRegistry
from millrace.stages.errors import Refused
from millrace.stages.testing.scripted.engine import ScriptedEngine

LOAD, ADMIN = "/v1/load_lora_adapter", "/admin/adapters"


class EngineOfAdapters(ScriptedEngine):
    """An engine with one known adapter, whose files cannot be read."""

    registry = AdapterRegistry({"one": Path("/nowhere/one")})

    @property
    def adapters(self) -> AdapterRegistry:
        return self.registry

    async def load_adapter(self, name: str, path: str | Path) -> None:
        raise Refused("the adapter has no weights", param="model")

    async def pin_adapter(self, name: str, *, on_device: bool = True) -> None:
        self.registry.require(name)

    def unpin_adapter(self, name: str) -> None:
        self.registry.require(name)


# path, body, the field at fault, and how the text begins
ROWS: list[tuple[str, dict[str, Any], str, str]] = [
    (LOAD, {"lora_name": "x", "lora_path": "y"}, "lora_path", "lora_path: this server loads adapters from"),
    (ADMIN, {"name": "x", "path": "y"}, "path", "path: this server loads adapters from"),
    (LOAD, {"lora_name": "one", "lora_path": "y"}, "lora_name", "lora_name = 'one': is in use; set load_inplace"),
    (ADMIN, {"name": "one", "path": "y"}, "name", "name = 'one': is in use; set replace to"),
    (LOAD, {"lora_name": "base", "lora_path": "y"}, "lora_name", "lora_name = 'base': is the model's own name"),
    (ADMIN, {"name": "base", "path": "y"}, "name", "name = 'base': is the model's own name"),
    (LOAD, {"lora_name": "one", "lora_path": "/nowhere/one", "load_inplace": True}, "lora_path", "the adapter has"),
    (ADMIN, {"name": "one", "path": "/nowhere/one", "replace": True}, "path", "the adapter has no weights"),
    (f"{ADMIN}/x/pin", {}, "name", "name = 'x': no adapter of that name"),
    (f"{ADMIN}/x/unpin", {}, "name", "name = 'x': no adapter of that name"),
]


async def told() -> list[tuple[str, str]]:
    """Of each row, the field at fault and the text."""
    config = ServerConfig(port=0, admin_key=("k",), enable_runtime_lora=True, served_model_name=("base",))
    found = []
    async with Server(config) as server, EngineOfAdapters() as engine, aiohttp.ClientSession(server.url) as session:
        server.attach(engine)
        for path, body, *_ in ROWS:
            async with session.post(path, json=body, headers={"Authorization": "Bearer k"}) as response:
                error = (await response.json())["error"]
                found.append((error["param"], error["message"]))
    return found


def test_a_route_of_adapters_names_the_fields_of_its_own_client() -> None:
    for (param, text), (*_, due, begin) in zip(asyncio.run(told()), ROWS, strict=True):
        assert param == due and text.startswith(begin)
