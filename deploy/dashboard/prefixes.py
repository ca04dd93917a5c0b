"""The tree of the prefix cache for the dashboard, read seldom, as its cost grows with the number of cached blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .adapters import SHORT, names_of

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine

MIN_S, SHARE = 2.0, 0.004  # between two readings, and the maximum share of time for them


class Prefixes:
    """The last reading, shared by all viewers."""

    def __init__(self) -> None:
        self.value: dict[str, Any] | None = None
        self._due_s = 0.0
        self._is_busy = False

    async def refresh(self, engine: Engine) -> None:
        """Reads the tree, if it is due."""
        began_s = time.monotonic()
        if self._is_busy or began_s < self._due_s or not engine.has_core:
            return
        self._is_busy = True
        try:
            tree = await engine.prefix_tree()
        finally:
            self._is_busy = False
            now_s = time.monotonic()
            self._due_s = now_s + max(MIN_S, (now_s - began_s) / SHARE)
        users, names = engine.status(with_sequences=True).owners, names_of(engine)
        self.value = None if tree is None else with_names(tree, users, names)

    def seen_by(self, may_see: Callable[[str], bool]) -> dict[str, Any] | None:
        """The tree without the ids of requests that a viewer may not see."""
        return shown_to(self.value, may_see)


def with_names(tree: dict[str, Any], users: Mapping[int, str], names: Mapping[str, str]) -> dict[str, Any]:
    """`tree` with request ids instead of slots, and adapters by the names of their digests."""
    for node in tree["nodes"].values():
        node["users"] = [users[slot] for slot in node.pop("slots") if slot in users]
        if adapter := node.get("adapter"):
            node["adapter"] = names.get(adapter, adapter[:SHORT])
    return tree


def shown_to(tree: dict[str, Any] | None, may_see: Callable[[str], bool]) -> dict[str, Any]:
    """`tree` with the users that a viewer may see; {} if there is none."""
    if tree is None:
        return {}
    nodes = {
        name: node | {"users": [user for user in node["users"] if may_see(user)]}
        for name, node in tree["nodes"].items()
    }
    return tree | {"nodes": nodes}
