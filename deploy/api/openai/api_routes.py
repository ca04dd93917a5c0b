"""What a folder of routes offers: its handlers by path, and its operations for the OpenAPI document."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler

from ...http.responses import expect
from ..service import Service
from .generation import Generation

if TYPE_CHECKING:
    from ..schema.operation import Operation


@dataclass(frozen=True, slots=True)
class ApiParts:
    """What the routes of one server share."""

    service: Service
    threads: Executor
    generation: Generation


class ApiRoutes(ABC):
    """The routes of one folder. `deploy/api/routes/table.py` lists these classes."""

    def __init__(self, parts: ApiParts) -> None:
        self.service = parts.service
        self._threads = parts.threads
        self._generation = parts.generation

    @abstractmethod
    def table(self) -> list[web.RouteDef]:
        """The handler of each path."""

    @staticmethod
    @abstractmethod
    def operations() -> Sequence[Operation]:
        """The same paths for the OpenAPI document, which alone imports the models of answers."""


def post(path: str, handler: Handler) -> web.RouteDef:
    """The route of a handler that reads a body."""
    return web.post(path, handler, expect_handler=expect)
