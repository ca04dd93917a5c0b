"""The adapter gate: a request with an adapter waits here until its tensors are on the host.

Runs before a request enters the waiting queue, on the event loop. Requests of other adapters pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...runtime.env.env import Env
from ...runtime.exit import Outbox
from ..errors import Overloaded, Refused, field_text
from ..messages import AdapterRef, Request
from .downloads import AdapterDownloads
from .loader import AdapterLoader
from .reader import AdapterReader
from .registry import AdapterEntry, AdapterRegistry, NoRoom, Pin
from .store import AdapterStore

POLL_S = 0.05  # between two looks whether requests have ended


class AdapterGate:
    """Admits requests once their adapter is in the store, and changes what a name stands for.

    An admitted request holds its adapter until `leave`, or until `request_ended`, which the exit calls; a request of
    many choices or beams holds it once.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        store: AdapterStore[Any],
        reader: AdapterReader,
        max_waiting: int = 512,
        downloads: AdapterDownloads | None = None,
        num_slots: int = 1,
    ) -> None:
        """`num_slots`: adapters on the device at once."""
        self.registry, self.store, self.loader = registry, store, AdapterLoader(store, reader, downloads)
        self.max_waiting, self.num_slots = max_waiting, num_slots
        self.on_renamed: Callable[[str], object] | None = None  # called with a name that has other files now, or none
        self.waiting: Counter[str] = Counter()  # requests that wait, by the name of their adapter
        self._held: dict[str, AdapterRef] = {}  # by request id
        self._names: dict[str, str] = {}  # of the adapters of requests that wait, by request id
        self._aborted: set[str] = set()  # requests that are refused once they have waited

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their adapters."""
        return self.waiting.total()

    async def admit(self, env: Env, request: Request) -> Request:
        """Waits until the request's adapter is loaded. Returns the request with its digest.

        Raises `Refused` for an unknown or unusable adapter or a request id in use, `Overloaded` if too many requests
        wait, and `OutOfResources` if the system allows no thread.
        """
        assert request.adapter is not None
        name, request_id = request.adapter.name, request.request_id
        entry = self.registry.require(name)
        if request_id in self._held:
            raise _in_use(request_id)
        digest = entry.digest if self.loader.try_use(entry) else await self._wait(env, entry, request_id)
        if request_id in self._held:  # another request with this id was admitted in the meantime
            self.loader.release(digest)
            raise _in_use(request_id)
        ref = self._held[request_id] = AdapterRef(name, digest, self._pinned("device"))
        entry.num_uses += 1
        return replace(request, adapter=ref)

    async def load(self, env: Env, name: str, path: Path) -> AdapterEntry:
        """Loads an adapter under a name, which then serves it; requests in progress keep the one that they have.

        Raises as `admit`, and `Refused` if the name was loaded or unloaded meanwhile; the name then stays what it is.
        """
        before, entry = self.registry.find(name), AdapterEntry(name, path)
        if before is None:
            self.registry.check_room()
        digest = await self.loader.use(env, entry)
        is_published = self.registry.publish(entry, before)
        self.loader.release(digest)
        if not is_published:
            self._drop(digest)
            problem = "was loaded or unloaded while this load ran; send it again if needed"
            raise Refused(field_text("lora_name", problem, repr(name[:64])))
        self._tell_renamed(name)
        if before is not None:
            entry.pin = before.pin
            self._note_pins()
            self._drop(before.digest)
        return entry

    async def pin(self, env: Env, name: str, pin: Pin) -> AdapterEntry:
        """Loads an adapter unless it is on the host, and keeps it there; with "device" also in the slot that it gets.

        The slot is kept from the next request with an adapter on. Raises as `admit`, and `NoRoom` where too many are
        pinned.
        """
        entry = self.registry.require(name)
        digest = await self.loader.use(env, entry)
        try:
            self._check_pins(entry, pin)
            entry.pin = pin
            self._note_pins()
        finally:
            self.loader.release(digest)
        return entry

    def unpin(self, name: str) -> AdapterEntry:
        """Lets an adapter be evicted. Raises `Refused` 404 for an unknown name."""
        entry = self.registry.require(name)
        entry.pin = None
        self._note_pins()
        return entry

    def has_room_to_pin(self) -> bool:
        """Whether another adapter may be pinned in host memory: those in slots and one that is read need room, too."""
        return len(self.store.pinned) < self.store.max_adapters - self.num_slots - 1

    def unload(self, name: str) -> bool:
        """Removes a name at once; False if it is not known. Requests in progress end as they would."""
        entry = self.registry.remove(name)
        if entry is not None:
            self._tell_renamed(name)
            self._note_pins()
            self._drop(entry.digest)
        return entry is not None

    def leave(self, request_id: str) -> None:
        """Releases the request's adapter, if it has one."""
        ref = self._held.pop(request_id, None)
        if ref is not None:
            self.loader.release(ref.digest)
            self._drop(ref.digest)

    def lose(self, request_id: str) -> None:
        """Forgets that the adapter of a request is in the store: it could not be loaded from there."""
        digest = self.digest_of(request_id)
        if digest is not None:
            self.store.lose(digest)

    def digest_of(self, request_id: str) -> str | None:
        """What the adapter of a request computes; None for a request without one, and before it is admitted."""
        ref = self._held.get(request_id)
        return None if ref is None else ref.digest

    def digests(self) -> dict[str, str]:
        """By request id, `digest_of` of all that have one."""
        return {request_id: ref.digest for request_id, ref in self._held.items()}

    def requests_of(self, digest: str) -> list[str]:
        """The ids of the requests that have an adapter."""
        return [request_id for request_id, ref in self._held.items() if ref.digest == digest]

    async def wait_unused(self, env: Env, name: str, timeout_s: float) -> list[str]:
        """Waits until no request has an adapter by this name; returns those that still have one after `timeout_s`.

        Requests that come meanwhile are not waited for.
        """
        request_ids, until_s = [each for each, ref in self._held.items() if ref.name == name], env.now() + timeout_s
        request_ids += [each for each, its_name in self._names.items() if its_name == name]
        while (left := [each for each in request_ids if each in self._held or each in self._names]) and (
            env.now() < until_s
        ):
            await env.sleep(min(POLL_S, until_s - env.now()))
        return left

    async def remove(
        self, env: Env, name: str, timeout_s: float, abort: Callable[[str], object] | None = None
    ) -> int | None:
        """As `unload`, and waits up to `timeout_s` for the requests that have it. Returns the number of those left.

        With `abort` they are ended. None if the name is not known.
        """
        if not self.unload(name):
            return None
        left = await self.wait_unused(env, name, timeout_s)
        if abort is not None:
            for request_id in left:
                self.abort(request_id)
                abort(request_id)
        return len(left)

    def abort(self, request_id: str) -> None:
        """Refuses a request that waits for its adapter, at the latest when that is loaded."""
        if request_id in self._names:
            self._aborted.add(request_id)

    def request_ended(self, outbox: Outbox[object], cause: str, error: BaseException | None) -> None:
        """Releases the adapter of a request that ended, for whatever reason. Called by the exit."""
        self.leave(outbox.request_id)

    async def aclose(self) -> None:
        """Cancels the loads."""
        await self.loader.aclose()

    async def _wait(self, env: Env, entry: AdapterEntry, request_id: str) -> str:
        """Waits for the adapter. Returns its digest, with a user added."""
        if (num_waiting := self.num_waiting) >= self.max_waiting:
            message = f"{num_waiting} requests wait for their adapters: try again in 2 s"
            raise Overloaded(message, queue_depth=num_waiting, estimated_wait_s=2.0)
        self.waiting[entry.name] += 1
        self._names[request_id] = entry.name
        try:
            digest = await self.loader.use(env, entry)
            if request_id in self._aborted:
                self.loader.release(digest)
                self._drop(digest)
                problem = "the adapter was removed while the request waited for it"
                raise Refused(field_text("model", problem, repr(entry.name[:64])))
            return digest
        finally:
            self._names.pop(request_id, None)
            self._aborted.discard(request_id)
            self.waiting[entry.name] -= 1
            if not self.waiting[entry.name]:
                del self.waiting[entry.name]

    def _tell_renamed(self, name: str) -> None:
        if self.on_renamed is not None:
            self.on_renamed(name)

    def _check_pins(self, entry: AdapterEntry, pin: Pin) -> None:
        """Raises `NoRoom` unless an adapter may be pinned."""
        if entry.digest not in self.store.pinned and not self.has_room_to_pin():
            most = f"max_cpu_loras = {self.store.max_adapters} has room for no more"
            what = (
                f"{len(self.store.pinned)} adapters are pinned, and {most} beside those in slots and one that is read"
            )
            raise NoRoom(f"{what}: unpin one, or start with a larger max_cpu_loras")
        pinned = self._pinned("device")
        if pin == "device" and entry.digest not in pinned and len(pinned) >= self.num_slots - 1:
            what = f"{len(pinned)} of max_loras = {self.num_slots} device slots are pinned"
            raise NoRoom(f"{what}, and one must serve all other adapters: unpin one, or start with a larger max_loras")

    def _pinned(self, *pins: Pin) -> tuple[str, ...]:
        """The digests of adapters that are pinned so, sorted."""
        return tuple(sorted({entry.digest for entry in self.registry if entry.pin in pins and entry.digest}))

    def _note_pins(self) -> None:
        self.store.pinned = frozenset(self._pinned("host", "device"))
        self.loader.note_room()

    def _drop(self, digest: str) -> None:
        """Frees an adapter that no name leads to any more."""
        if digest and all(entry.digest != digest for entry in self.registry):
            self.store.drop(digest)


def _in_use(request_id: str) -> Refused:
    return Refused(f"request id {request_id!r} is in use", param="request_id")
