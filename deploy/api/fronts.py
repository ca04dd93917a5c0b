"""`Fronts`: what a route asks of the other front processes of its server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from aiohttp import web

from ...stages.traffic.traffic_rules import TrafficRules


class FrontSocket(Protocol):
    """A WebSocket to another front."""

    is_over: bool  # at its end: the client has left for good, so that nothing may be resumed

    async def send(self, message: bytes) -> None:
        """Sends a text message. `ConnectionError` if the socket has ended."""

    async def receive(self) -> bytes | None:
        """The next text message; None once the socket has ended."""


class Fronts(Protocol):
    """The fronts of this server. `mark` begins what is random in ids that live in this one."""

    mark: str
    number: int  # of this one

    @property
    def numbers(self) -> Sequence[int]:
        """Of all, this one's first."""

    @property
    def states(self) -> Sequence[Mapping[str, Any]]:
        """What is known of each: number, pid, state, reason, num_restarts, models."""

    def tell_traffic(self, rules: TrafficRules) -> None:
        """These rules were set at this front: all follow them."""

    def owner_of(self, marked: str) -> int | None:
        """The other front in which an id lives, by what is random in it; None for this one's, and for unknown ids."""

    async def pass_on(self, request: web.Request, front: int, body: bytes | None = None) -> web.StreamResponse:
        """Answers a request as another front does, into its record if it has one. `ApiError` 503: that one is away."""

    def events(
        self, headers: Mapping[str, str], front: int, path: str, body: bytes
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The events that a front streams for a POST. `headers`: of the client. `ApiError` for another answer."""

    def open_socket(
        self, headers: Mapping[str, str], front: int, path: str
    ) -> AbstractAsyncContextManager[FrontSocket]:
        """A WebSocket to another front, with the client's keys."""
