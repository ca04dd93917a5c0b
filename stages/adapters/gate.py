"""The adapter gate: a request with an adapter waits here until its tensors are on the host.

Runs before a request enters the waiting queue, on the event loop. Requests of other adapters pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...model.errors import ModelError
from ...model.lora.adapter import Adapter
from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ...runtime.exit import Outbox
from ...runtime.workers.thread_start import ThreadNotStarted
from ..errors import OutOfResources, Overloaded, Refused
from ..messages import AdapterRef, Request
from .registry import AdapterEntry, AdapterRegistry
from .store import AdapterStore

FAILED_S = 10.0  # time in which an adapter that could not be loaded is not tried again

log = get_logger("millrace.stages")


class AdapterGate:
    """Admits requests once their adapter is in the store.

    Requests for one adapter wait for one load. An admitted request holds its adapter until `leave`, or until
    `request_ended`, which the exit calls; a request of many choices or beams holds it once.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        store: AdapterStore,
        read: Callable[[Path, str], Adapter],
        max_waiting: int = 512,
    ) -> None:
        """`read` reads an adapter from its folder, with the name for messages; it raises `ModelError`."""
        self.registry, self.store = registry, store
        self.max_waiting = max_waiting
        self.num_waiting = 0
        self.num_loads = 0
        self.load_seconds = 0.0  # of all loads
        self._read = read
        self._held: dict[str, str] = {}  # request id -> digest
        self._loads: dict[AdapterEntry, asyncio.Task[Adapter]] = {}
        self._released = asyncio.Event()

    async def admit(self, env: Env, request: Request) -> Request:
        """Waits until the request's adapter is loaded. Returns the request with its digest.

        Raises `Refused` for an unknown or unusable adapter or a request id in use, `Overloaded` if too many requests
        wait, and `OutOfResources` if the system allows no thread.
        """
        assert request.adapter is not None
        name, request_id = request.adapter.name, request.request_id
        entry = self.registry.require(name)
        if request_id in self._held:
            raise Refused(f"request id {request_id!r} is in use", param="request_id")
        if not (entry.digest and self.store.use(entry.digest)):
            if self.num_waiting >= self.max_waiting:
                message = f"{self.num_waiting} requests wait for their adapters: try again in 2 s"
                raise Overloaded(message, queue_depth=self.num_waiting, estimated_wait_s=2.0)
            self.num_waiting += 1
            try:
                digest = await self._bring_in(env, entry)
            finally:
                self.num_waiting -= 1
        else:
            digest = entry.digest
        if request_id in self._held:  # another request with this id was admitted in the meantime
            self._release(digest)
            raise Refused(f"request id {request_id!r} is in use", param="request_id")
        self._held[request_id] = digest
        entry.num_uses += 1
        return replace(request, adapter=AdapterRef(name, digest))

    async def load(self, env: Env, name: str, path: Path) -> AdapterEntry:
        """Loads an adapter under a name, which then serves it; requests in progress keep the one that they have.

        Raises as `admit`; the name then stays what it was.
        """
        before = self.registry.find(name)
        entry = self.registry.put(name, path)
        try:
            self._release(await self._bring_in(env, entry))
        except BaseException:
            self.registry.restore(name, before)
            raise
        if before is not None:
            self._drop(before.digest)
        return entry

    def unload(self, name: str) -> bool:
        """Removes a name at once; False if it is not known. Requests in progress end as they would."""
        entry = self.registry.remove(name)
        if entry is not None:
            self._drop(entry.digest)
        return entry is not None

    def leave(self, request_id: str) -> None:
        """Releases the request's adapter, if it has one."""
        digest = self._held.pop(request_id, None)
        if digest is not None:
            self._release(digest)
            self._drop(digest)

    def request_ended(self, outbox: Outbox[object], cause: str, error: BaseException | None) -> None:
        """Releases the adapter of a request that ended, for whatever reason. Called by the exit."""
        self.leave(outbox.request_id)

    async def aclose(self) -> None:
        """Cancels the loads."""
        for load in self._loads.values():
            load.cancel()
        await asyncio.gather(*self._loads.values(), return_exceptions=True)

    def _drop(self, digest: str) -> None:
        """Frees an adapter that no name leads to any more."""
        if digest and all(entry.digest != digest for entry in self.registry):
            self.store.drop(digest)

    def _release(self, digest: str) -> None:
        self.store.release(digest)
        self._released.set()

    async def _bring_in(self, env: Env, entry: AdapterEntry) -> str:
        """Loads the adapter and adds a user; waits while those in use leave no room. Returns its digest."""
        if env.now() - entry.failed_at_s < FAILED_S:
            raise Refused(entry.error, param="model")
        while True:
            load = self._loads.get(entry)
            if load is None:
                load = self._loads[entry] = asyncio.ensure_future(self._load(env, entry))
                load.add_done_callback(lambda done: self._load_ended(entry, done))
            adapter = await asyncio.shield(load)
            while not self.store.add(adapter):
                self._released.clear()
                await self._released.wait()
            if self.store.use(adapter.digest):
                return adapter.digest

    def _load_ended(self, entry: AdapterEntry, load: asyncio.Task[Adapter]) -> None:
        """Forgets a load. Reads its error, which no request gets if all that waited for it are gone."""
        self._loads.pop(entry, None)
        error = None if load.cancelled() else load.exception()
        if error is not None and not isinstance(error, (Refused, OutOfResources)):
            log.error("adapter.load_failed", name=entry.name, error=type(error).__name__, exc_info=error)

    async def _load(self, env: Env, entry: AdapterEntry) -> Adapter:
        began_s = env.now()
        try:
            adapter = await env.run_in_thread(self._read_whole, entry.path, entry.name)
        except ThreadNotStarted:
            raise OutOfResources("thread") from None
        except (ModelError, OSError) as error:
            entry.error, entry.failed_at_s = str(error), env.now()
            log.warning("adapter.refused", name=entry.name, reason=str(error))
            raise Refused(str(error), param="model") from None
        entry.digest, entry.parent, entry.error = adapter.digest, adapter.parent, ""
        entry.rank, entry.num_bytes, entry.load_s = adapter.rank, adapter.num_bytes, env.now() - began_s
        self.num_loads += 1
        self.load_seconds += entry.load_s
        log.info("adapter.loaded", name=entry.name, digest=adapter.digest[:16], rank=adapter.rank, seconds=entry.load_s)
        return adapter

    def _read_whole(self, path: Path, name: str) -> Adapter:
        """Reads an adapter with its digest, which takes as long as the rest. Runs in a thread."""
        adapter = self._read(path, name)
        assert adapter.digest and adapter.rank and adapter.num_bytes >= 0
        return adapter
