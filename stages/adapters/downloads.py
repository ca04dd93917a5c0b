"""The folders of adapters on the Hub, which are downloaded when they are first needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path

from ...runtime.env.env import Env
from .registry import AdapterEntry

MAX_DOWNLOADS = 2  # at once


class AdapterDownloads:
    """Downloads the adapters that the settings allow. Other entries have their folder as path."""

    def __init__(self, allowed: Collection[str] = (), fetch: Callable[[str, str], Path] | None = None) -> None:
        """`fetch` downloads an adapter, of a commit or "", and returns its folder, which has the commit as its name."""
        self._allowed, self._fetch = frozenset(allowed), fetch
        self._free = asyncio.Semaphore(MAX_DOWNLOADS)

    def is_needed(self, entry: AdapterEntry) -> bool:
        """Whether an entry is one of the Hub that is not on this machine."""
        return str(entry.path) in self._allowed and (entry.folder is None or not entry.folder.is_dir())

    async def run(self, env: Env, entry: AdapterEntry) -> None:
        """Downloads an entry's files and sets its folder. An entry stays at the commit of its first download.

        Raises `ModelError`, `OSError`, and `ThreadNotStarted`.
        """
        assert self._fetch is not None
        commit = "" if entry.folder is None else entry.folder.name
        async with self._free:
            entry.folder = await env.run_in_thread(self._fetch, str(entry.path), commit)
