"""Loads adapters into the store: one load for all that wait for it, with room reserved before its files are read.

Loads get room in the order of arrival. Requests of adapters in the store pass them, but only so many: then one of
those adapters takes no more requests until there is room.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from ...model.errors import HubUnreachable, ModelError
from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ...runtime.workers.thread_start import ThreadNotStarted
from ..errors import OutOfResources, Refused, Unavailable
from .downloads import AdapterDownloads
from .reader import AdapterReader, StoredAdapter, size_on_disk
from .registry import AdapterEntry
from .store import AdapterStore

FAILED_S = 10.0  # time in which an adapter that could not be loaded is not tried again
MAX_PASSES = 50  # requests of other adapters that are admitted while a load waits for room
MAX_READS = 2  # adapters that are read at once; each is in memory twice for a moment

log = get_logger("millrace.stages")


@dataclass(slots=True, eq=False)
class _Load:
    """A load in progress, and how many wait for it."""

    entry: AdapterEntry
    arrived_at: int  # in passes
    num_bytes: int  # of its files
    num_waiting: int = 0
    has_room: bool = False
    is_downloading: bool = False  # it takes part in the wait for room afterwards
    held: str = ""  # the digest, while it has a user on behalf of the requests that wait
    task: asyncio.Task[str] = field(init=False)  # returns the digest

    @property
    def is_in_line(self) -> bool:
        """Whether it waits for room."""
        return not (self.is_downloading or self.has_room or self.held)


class AdapterLoader:
    """The loads of one engine. Used on the event loop; `reader` reads the files.

    A digest that `use` or `try_use` has returned has one more user in the store, until `release`.
    """

    def __init__(
        self, store: AdapterStore[Any], reader: AdapterReader, downloads: AdapterDownloads | None = None
    ) -> None:
        self.store = store
        self.num_loads = 0
        self.load_seconds = 0.0  # of all loads, without their wait for room
        self._reader, self._downloads = reader, downloads or AdapterDownloads()
        self._loads: dict[AdapterEntry, _Load] = {}  # in the order of arrival
        self._reads = asyncio.Semaphore(MAX_READS)
        self._changed = asyncio.Event()  # room may be free
        self._num_passes = 0  # requests that were admitted while a load waited for room
        self._draining: str | None = None  # the digest that takes no more requests
        self._is_closed = False

    def try_use(self, entry: AdapterEntry) -> bool:
        """Adds a user if the adapter is in the store and takes requests; returns whether it does."""
        if not entry.digest or entry.digest == self._draining or not self.store.use(entry.digest):
            return False
        oldest = self._oldest_without_room()
        if oldest is not None:
            self._num_passes += 1
            self._drain_if_owed(oldest)
        return True

    async def use(self, env: Env, entry: AdapterEntry) -> str:
        """Waits until the adapter is in the store and adds a user. Returns its digest.

        Raises `Refused` for an adapter that cannot be served, `OutOfResources` if the system allows no thread, and
        `Unavailable` once the loader is closed, or if the process that reads it ended.
        """
        if self._is_closed:
            raise _closed()
        load = self._loads.get(entry)
        if load is None:
            if env.now() - entry.failed_at_s < FAILED_S:
                raise Refused(entry.error, param="model")
            load = self._start(env, entry)
        load.num_waiting += 1
        try:
            digest = await asyncio.shield(load.task)
            self.store.use(digest)
            return digest
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if load.task.cancelled() and not (task is not None and task.cancelling()):  # by `aclose`
                raise _closed() from None
            raise
        finally:
            load.num_waiting -= 1
            if not load.num_waiting:
                self._abandon(load)

    def release(self, digest: str) -> None:
        """Removes a user."""
        self.store.release(digest)
        self._changed.set()

    def note_room(self) -> None:
        """Room may be free, as an adapter has lost its device slot."""
        self._changed.set()

    async def aclose(self) -> None:
        """Cancels the loads. What waits for them gets `Unavailable`."""
        self._is_closed = True
        tasks = [load.task for load in self._loads.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- a load

    def _start(self, env: Env, entry: AdapterEntry) -> _Load:
        load = self._loads[entry] = _Load(entry, self._num_passes, size_on_disk(entry.folder or entry.path))
        load.is_downloading = self._downloads.is_needed(entry)
        load.task = asyncio.ensure_future(self._run(env, load))
        load.task.add_done_callback(lambda done: self._ended(load))
        return load

    async def _run(self, env: Env, load: _Load) -> str:
        if load.is_downloading:
            await self._download(env, load)
        if not await self._wait_for_room(load):
            return load.held
        is_stored = False
        try:
            async with self._reads:
                adapter = await self._read(env, load.entry)
            self.store.add(adapter, load.num_bytes)
            is_stored = True
        finally:
            if not is_stored:
                self.store.cancel_reservation(load.num_bytes)
            self._changed.set()
        self._hold(load, adapter.digest)
        return load.held

    def _hold(self, load: _Load, digest: str) -> bool:
        """Adds a user to an adapter in the store, until all that wait have theirs; returns whether it is there."""
        if not self.store.use(digest):
            return False
        load.held = digest
        return True

    def _ended(self, load: _Load) -> None:
        """Forgets a load. Reads its error, which no request gets if all that waited for it are gone."""
        self._forget(load)
        if not load.num_waiting:
            self._abandon(load)
        error = None if load.task.cancelled() else load.task.exception()
        if error is not None and not isinstance(error, (Refused, Unavailable)):
            log.error("adapter.load_failed", name=load.entry.name, error=type(error).__name__, exc_info=error)

    def _abandon(self, load: _Load) -> None:
        """Nothing waits for a load any more: ends its wait for room, or removes the user that it has added."""
        if load.held:
            held, load.held = load.held, ""
            self.release(held)
        elif not (load.has_room or load.is_downloading):  # these go on in a thread, and the next request may want them
            load.task.cancel()
            self._forget(load)

    def _forget(self, load: _Load) -> None:
        if self._loads.get(load.entry) is load:
            del self._loads[load.entry]
        self._draining = None  # the load that is the oldest now may begin another drain
        self._changed.set()

    # -- room

    async def _wait_for_room(self, load: _Load) -> bool:
        """Waits until room is reserved, or the adapter is in the store: then holds it and returns False."""
        while True:
            is_oldest, digest = load is self._oldest_without_room(), load.entry.digest
            if digest and (is_oldest or digest != self._draining) and self._hold(load, digest):
                return False
            if is_oldest and self.store.reserve(load.num_bytes):
                load.has_room, self._draining = True, None
                self._changed.set()  # the next load is the oldest now
                return True
            if is_oldest:
                self._drain_if_owed(load)
            self._changed.clear()
            await self._changed.wait()

    def _oldest_without_room(self) -> _Load | None:
        """The load that is the next to get room."""
        return next((load for load in self._loads.values() if load.is_in_line), None)

    def _drain_if_owed(self, load: _Load) -> None:
        """Lets an adapter take no more requests, if enough of them have passed a load that waits for room."""
        if self._draining is None and self._num_passes - load.arrived_at >= MAX_PASSES:
            self._draining = self.store.find_to_drain()

    # -- downloading and reading

    async def _download(self, env: Env, load: _Load) -> None:
        """Downloads an adapter's files. It takes no room and no place among the reads meanwhile."""
        entry = load.entry
        try:
            await self._downloads.run(env, entry)
        except ThreadNotStarted:
            raise OutOfResources("thread") from None
        except HubUnreachable as error:
            log.warning("adapter.hub_unreachable", name=entry.name, reason=str(error))
            message = f"adapter '{entry.name}': {error}; send the request again in 10 s"
            raise Unavailable(message, code="loading") from None
        except (ModelError, OSError) as error:
            raise _refused(env, entry, error) from None
        load.is_downloading, load.arrived_at = False, self._num_passes
        load.num_bytes = size_on_disk(entry.folder or entry.path)
        if not load.num_waiting:
            self._forget(load)
            raise asyncio.CancelledError

    async def _read(self, env: Env, entry: AdapterEntry) -> StoredAdapter:
        began_s = env.now()
        try:
            adapter = await self._reader.read(env, entry.folder or entry.path, entry.name, entry.digest)
        except ThreadNotStarted:
            raise OutOfResources("thread") from None
        except (ModelError, OSError) as error:
            raise _refused(env, entry, error) from None
        entry.digest, entry.parent, entry.error = adapter.digest, adapter.parent, ""
        entry.rank, entry.num_bytes, entry.load_s = adapter.rank, adapter.num_bytes, env.now() - began_s
        self.num_loads += 1
        self.load_seconds += entry.load_s
        log.info("adapter.loaded", name=entry.name, digest=adapter.digest[:16], rank=adapter.rank, seconds=entry.load_s)
        return adapter


def _refused(env: Env, entry: AdapterEntry, error: Exception) -> Refused:
    """Notes that an adapter cannot be served, and returns the error for clients."""
    entry.error, entry.failed_at_s = str(error), env.now()
    log.warning("adapter.refused", name=entry.name, reason=str(error))
    return Refused(str(error), param="model")


def _closed() -> Unavailable:
    return Unavailable("the server is shutting down: send the request to another server", code="draining")
