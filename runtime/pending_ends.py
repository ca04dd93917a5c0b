"""Ends of requests that a stage is told of once it holds none of their items."""

from __future__ import annotations

from collections.abc import Callable, Collection


class PendingEnds:
    """Calls `tell(request_id, cause)` for each ended request, when all holders of its items have released them."""

    def __init__(self, tell: Callable[[str, str], object]) -> None:
        self._tell = tell
        self._pending: list[tuple[str, str, set[object]]] = []

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, request_id: str, cause: str, holders: Collection[object]) -> None:
        """Adds an ended request; without `holders`, tells at once."""
        if holders:
            self._pending.append((request_id, cause, set(holders)))
        else:
            self._tell(request_id, cause)

    def released(self, holder: object) -> None:
        """Tells the requests that only `holder` still held."""
        for _, _, holders in self._pending:
            holders.discard(holder)
        ready = [(request_id, cause) for request_id, cause, holders in self._pending if not holders]
        self._pending = [pending for pending in self._pending if pending[2]]
        for request_id, cause in ready:
            self._tell(request_id, cause)
