"""Which keys a prefix cache has gained and lost since they were last told, for a router that keeps an index of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class KeyDelta(NamedTuple):
    """The changes since the last news; a key is in at most one of both."""

    added: list[bytes]
    removed: list[bytes]


class KeyChanges:
    """Collects the changes. A key is there while any tier, of the device or the host, holds its block."""

    def __init__(self) -> None:
        self._num_held: dict[bytes, int] = {}  # tiers that hold the key's block
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def add(self, key: bytes) -> None:
        """A tier holds the block of this key now."""
        num_held = self._num_held.get(key, 0)
        self._num_held[key] = num_held + 1
        if not num_held:
            if key in self._removed:
                del self._removed[key]
            else:
                self._added[key] = None

    def remove(self, keys: Iterable[bytes]) -> None:
        """A tier holds the blocks of these keys no longer."""
        for key in keys:
            num_held = self._num_held.pop(key) - 1
            if num_held:
                self._num_held[key] = num_held
            elif key in self._added:
                del self._added[key]
            else:
                self._removed[key] = None

    def take(self) -> KeyDelta:
        """The news, which are then told."""
        news = KeyDelta(list(self._added), list(self._removed))
        self._added.clear()
        self._removed.clear()
        return news

    def held(self) -> list[bytes]:
        """All keys that are there, for a router that knows none of them yet."""
        return list(self._num_held)
