"""The adapters of the engine process, seen from the front process: read there, and again in its successor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ...model.errors import AdapterError
from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ..adapters.gate import AdapterGate
from ..errors import Failed, OutOfResources, Unavailable
from .process_client import EngineClient, EngineDied
from .protocol import AdapterCard, DropAdapter

log = get_logger("millrace.stages")


class AdaptersThere(Protocol):
    """Reads and drops adapters in engine processes."""

    async def read(self, env: Env, path: Path, name: str, digest: str) -> AdapterCard:
        """As `AdapterReader.read`."""

    def drop(self, digest: str) -> None:
        """Frees an adapter there."""


class RemoteAdapters:
    """Reads and drops adapters in the present engine process, which `client` returns."""

    def __init__(self, client: Callable[[], EngineClient | None]) -> None:
        self._client = client
        self._origins: dict[str, tuple[Path, str]] = {}  # digest -> folder and name that it was read from
        self._residences: dict[str, tuple[EngineClient, int]] = {}  # digest -> where it was read last, as which one

    def share_origins(self, other: RemoteAdapters) -> None:
        """Another engine process has the same adapters: what is read there can be read here again."""
        self._origins = other._origins

    def has(self, card: AdapterCard | None) -> bool:
        """Whether the present process has read the adapter."""
        return card is not None and self.holds(card.digest)

    def holds(self, digest: str) -> bool:
        """Whether the present process has read the adapter with this digest."""
        client, _ = self._residences.get(digest, (None, 0))
        return client is not None and client is self._client()

    async def read(self, env: Env, path: Path, name: str, digest: str) -> AdapterCard:
        """As `AdapterReader.read`."""
        client = self._client()
        try:
            if client is None:
                raise EngineDied("there is none")
            card = await client.read_adapter(str(path), name, digest)
        except EngineDied:
            message = f"adapter '{name}': the engine process ended while it was read; send the request again in 2 s"
            raise Unavailable(message, code="loading") from None
        if card.lacks_thread:
            raise OutOfResources("thread")
        if card.error:
            raise AdapterError(card.error)
        self._origins[card.digest], self._residences[card.digest] = (path, name), (client, card.residence)
        return card

    def drop(self, digest: str) -> None:
        """Frees an adapter there."""
        self._origins.pop(digest, None)
        client, residence = self._residences.pop(digest, (None, 0))
        if client is not None and client is self._client():
            client.post(DropAdapter(digest, residence))

    async def restore(
        self, env: Env, gate: AdapterGate, fail: Callable[[str, Exception], object], *, keeps_unused: bool = False
    ) -> None:
        """Reads pinned adapters and those of requests in progress again, in a new process, and forgets the others.

        A request whose adapter is not in its folder any more ends with an error, by `fail`. Adapters may be dropped
        and read meanwhile; in the end the process has all that are stored. `keeps_unused`: reads the others, too, as
        other processes still have them.
        """
        while lacking := [digest for digest in gate.store.digests() if not self.holds(digest)]:
            for digest in lacking:
                await self._restore(env, gate, fail, digest, keeps_unused)

    async def _restore(
        self, env: Env, gate: AdapterGate, fail: Callable[[str, Exception], object], digest: str, keeps_unused: bool
    ) -> None:
        if self.holds(digest) or digest not in gate.store:  # it was read or dropped meanwhile
            return
        origin = self._origins.get(digest)
        is_needed = keeps_unused or digest in gate.store.pinned or gate.store.num_users(digest) > 0
        if origin is None or not is_needed:
            gate.store.lose(digest)
            return
        try:
            card = await self.read(env, *origin, digest)
            if digest not in gate.store:
                self.drop(card.digest)  # it was dropped while it was read
        except AdapterError as error:
            log.error("adapter.lost", name=origin[1], reason=str(error))
            gate.store.lose(digest)
            message = f"adapter '{origin[1]}' is not in its folder any more, and the engine process was replaced"
            for request_id in gate.requests_of(digest):
                fail(request_id, Failed(message, code="engine_died"))
