"""Responses that may be asked for later, in memory, up to a number of entries and of bytes.

Knows who owns what, and what goes first when there is no room. Refuses to know what a response says: it keeps bytes,
whose length is the memory they take.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence

from ...errors import ApiError, shorten

MAX_ENTRIES = 4096


class StoredResponse:
    """One response: its own input items, and what has become of it. `events` are those of its stream as they go over
    the wire, if it is made in the background and was asked for as one; that of sequence number n is `events[n]`."""

    def __init__(self, response_id: str, owner: str, previous_id: str | None, items: bytes, response: bytes) -> None:
        self.id = response_id
        self.owner = owner  # of the API key it was made with
        self.previous_id = previous_id
        self.items = items  # JSON
        self.response = response  # JSON
        self.output = b"[]"  # JSON; of a response that is over
        self.events: list[bytes] | None = None
        self.task: asyncio.Task[None] | None = None  # that makes it, in the background
        self.is_over = False
        self.num_bytes = 0  # as the store counts them
        self._news = asyncio.Event()

    @property
    def length(self) -> int:
        """Bytes of all that is kept."""
        parts = (self.items, self.response, self.output, *(self.events or ()))
        return sum(map(len, parts))

    def ring(self) -> None:
        """There are new events, or there will be none."""
        self._news.set()
        self._news = asyncio.Event()

    async def events_from(self, first: int) -> AsyncGenerator[list[bytes], None]:
        """Its events from `first` on, those that are there at once and then as they come, to the last one. Ends early
        if they are not kept any more."""
        while self.events is not None:
            if new := self.events[first:]:
                first += len(new)
                yield new
            elif self.is_over:
                return
            else:
                await self._news.wait()


class ResponseStore:
    """All that is kept for all clients of one server. Those asked for least recently go first, but for those that are
    still being made. Another key's response is as unknown as one that never was."""

    def __init__(self, max_bytes: int, max_entries: int = MAX_ENTRIES) -> None:
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self.num_bytes = 0
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()  # least recently asked for first

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._kept

    def get(self, response_id: str, owner: str, param: str = "response_id") -> StoredResponse:
        """The owner's response. `ApiError` 404 if it has none of that id."""
        stored = self._kept.get(response_id)
        if stored is None or stored.owner != owner:
            shown = shorten(repr(response_id), 128)
            message = f"{param} = {shown}: there is no such response, or it is not kept any more"
            raise ApiError("response_not_found", message, param=param)
        self._kept.move_to_end(response_id)
        return stored

    def chain(self, response_id: str, owner: str, param: str = "previous_response_id") -> list[StoredResponse]:
        """The response and all that it goes on from, the first one first. All count as asked for, the earlier the
        more, so that room is never made by taking the beginning of what is kept. `ApiError` 404 if one is missing."""
        chain = []
        wanted: str | None = response_id
        while wanted is not None:
            chain.append(self.get(wanted, owner, param))
            wanted = chain[-1].previous_id
        return chain[::-1]

    def put(self, stored: StoredResponse) -> bool:
        """Keeps it, if there is room or room can be made."""
        self._kept[stored.id] = stored
        self._resize(stored, stored.length)
        return stored.id in self._kept

    def update(self, stored: StoredResponse, response: bytes, output: bytes) -> None:
        """What has become of it now. It is forgotten if there is no room for that."""
        stored.response, stored.output = response, output
        if stored.id in self._kept:
            self._resize(stored, stored.length)

    def grow(self, stored: StoredResponse, events: Sequence[bytes]) -> None:
        """More events of a response that is being made. If there is no room for them, and none can be made, its events
        are not kept any more; the response still is."""
        if stored.events is None:
            return
        stored.events += events
        if stored.id in self._kept:
            self._resize(stored, stored.num_bytes + sum(map(len, events)))
        stored.ring()

    def delete(self, response_id: str, owner: str) -> StoredResponse:
        """Forgets the owner's response. `ApiError` 404 if there is none."""
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
                stored.ring()
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
