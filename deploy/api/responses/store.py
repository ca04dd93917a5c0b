"""The store of responses for later retrieval: in memory, bounded in entries and bytes.

It keeps encoded bytes, which it does not parse, and counts them with the objects around them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence

from ...errors import ApiError, shorten

MAX_ENTRIES = 4096
ENTRY_BYTES = 2048  # of the objects of a response beside its parts, measured
EVENT_BYTES = 56  # of the object of an event beside its text, and of its place in the list


def exact(data: bytes) -> bytes:
    """A copy that takes as much memory as it has bytes: orjson leaves up to four times as much behind its own."""
    return bytes(memoryview(data))


class StoredResponse:
    """One response: its input items, its state and its output.

    `events` are the framed events of its stream, if it is made in the background with `stream`; else None. `events[n]`
    has sequence number n.
    """

    def __init__(self, response_id: str, owner: str, previous_id: str | None, items: bytes, response: bytes) -> None:
        self.id = response_id
        self.owner = owner  # owner of the API key that created it
        self.previous_id = previous_id
        self.items = exact(items)  # JSON
        self.response = exact(response)  # JSON
        self.output = b"[]"  # JSON; complete once `is_over`
        self.events: list[bytes] | None = None
        self.task: asyncio.Task[None] | None = None  # generates it, if in the background
        self.is_over = False
        self.num_bytes = 0  # as the store counts them
        self._new_events = asyncio.Event()

    @property
    def length(self) -> int:
        """Memory of all stored parts, in bytes."""
        events = self.events or ()
        parts = (self.items, self.response, self.output, *events)
        return ENTRY_BYTES + EVENT_BYTES * len(events) + sum(map(len, parts))

    def wake_readers(self) -> None:
        """Wakes the readers: there are new events, or there will be none."""
        self._new_events.set()
        self._new_events = asyncio.Event()

    async def events_from(self, first: int) -> AsyncGenerator[list[bytes], None]:
        """Yields its events from number `first` to the last, in lists of all that have arrived.

        Ends early if the events are dropped for lack of room.
        """
        while self.events is not None:
            if new := self.events[first:]:
                first += len(new)
                yield new
            elif self.is_over:
                return
            else:
                await self._new_events.wait()


class ResponseStore:
    """The stored responses of all clients of one server.

    The least recently used response is evicted first, except those in progress. A response of another owner is
    reported exactly like one that does not exist.
    """

    def __init__(self, max_bytes: int, max_entries: int = MAX_ENTRIES) -> None:
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self.num_bytes = 0
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._kept

    def get(self, response_id: str, owner: str, param: str = "response_id") -> StoredResponse:
        """The owner's response. `ApiError` 404 if the owner has none with that id."""
        stored = self._kept.get(response_id)
        if stored is None or stored.owner != owner:
            shown = shorten(repr(response_id), 128)
            message = f"{param} = {shown}: no such response exists, or it is no longer stored"
            raise ApiError("response_not_found", message, param=param)
        self._kept.move_to_end(response_id)
        return stored

    def chain(self, response_id: str, owner: str, param: str = "previous_response_id") -> list[StoredResponse]:
        """The response and its predecessors by `previous_response_id`, oldest first.

        `ApiError` 404 if one is missing. All count as used, the oldest most recently, so eviction never removes the
        beginning of a stored chain first.
        """
        chain = []
        wanted: str | None = response_id
        while wanted is not None:
            chain.append(self.get(wanted, owner, param))
            wanted = chain[-1].previous_id
        return chain[::-1]

    def put(self, stored: StoredResponse) -> bool:
        """Stores a response, evicting others if needed; False if there is no room."""
        self._kept[stored.id] = stored
        self._resize(stored, stored.length)
        return stored.id in self._kept

    def update(self, stored: StoredResponse, response: bytes, output: bytes) -> None:
        """Replaces its state and output. The response is dropped if there is no room."""
        stored.response, stored.output = exact(response), exact(output)
        if stored.id in self._kept:
            self._resize(stored, stored.length)

    def grow(self, stored: StoredResponse, events: Sequence[bytes]) -> None:
        """Appends events of a response in progress.

        If eviction cannot make room, its events are dropped and the response stays.
        """
        if stored.events is None:
            return
        stored.events += events
        if stored.id in self._kept:
            self._resize(stored, stored.num_bytes + EVENT_BYTES * len(events) + sum(map(len, events)))
        stored.wake_readers()

    def delete(self, response_id: str, owner: str) -> StoredResponse:
        """Removes the owner's response and returns it. `ApiError` 404 if there is none."""
        stored = self.get(response_id, owner)
        self._drop(stored)
        return stored

    def _resize(self, stored: StoredResponse, num_bytes: int) -> None:
        self.num_bytes += num_bytes - stored.num_bytes
        stored.num_bytes = num_bytes
        while self._is_over_limit():
            victim = next((other for other in self._kept.values() if other.is_over and other is not stored), None)
            if victim is not None:
                self._drop(victim)
            elif stored.events is not None:
                stored.events = None
                stored.wake_readers()
                self.num_bytes += stored.length - stored.num_bytes
                stored.num_bytes = stored.length
            else:
                self._drop(stored)
                return

    def _is_over_limit(self) -> bool:
        return self.num_bytes > self.max_bytes or len(self._kept) > self.max_entries

    def _drop(self, stored: StoredResponse) -> None:
        if self._kept.pop(stored.id, None) is not None:
            self.num_bytes -= stored.num_bytes
            stored.num_bytes = 0
