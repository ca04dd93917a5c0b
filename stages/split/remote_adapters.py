"""The adapters of the engine process, seen from the front process: read there, and again in its successor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...model.errors import AdapterError
from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ..adapters.gate import AdapterGate
from ..errors import Failed, OutOfResources, Unavailable
from .process_client import EngineClient, EngineDied
from .protocol import AdapterCard, DropAdapter

log = get_logger("millrace.stages")


class RemoteAdapters:
    """Reads and drops adapters in the present engine process, which `client` returns."""

    def __init__(self, client: Callable[[], EngineClient | None]) -> None:
        self._client = client
        self._origins: dict[str, tuple[Path, str]] = {}  # digest -> folder and name that it was read from

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
        self._origins[card.digest] = (path, name)
        return card

    def drop(self, digest: str) -> None:
        """Frees an adapter there."""
        self._origins.pop(digest, None)
        client = self._client()
        if client is not None:
            client.post(DropAdapter(digest))

    async def restore(self, env: Env, gate: AdapterGate, fail: Callable[[str, Exception], object]) -> None:
        """Reads the adapters of requests in progress again, in a new process, and forgets the others.

        A request whose adapter is not in its folder any more ends with an error, by `fail`.
        """
        for digest in gate.store.digests():
            origin = self._origins.get(digest)
            if origin is None or not gate.store.num_users(digest):
                gate.store.lose(digest)
                continue
            try:
                await self.read(env, *origin, digest)
            except AdapterError as error:
                log.error("adapter.lost", name=origin[1], reason=str(error))
                gate.store.lose(digest)
                message = f"adapter '{origin[1]}' is not in its folder any more, and the engine process was replaced"
                for request_id in gate.requests_of(digest):
                    fail(request_id, Failed(message, code="engine_died"))
