"""Reads adapters from their folders: what the loader awaits, and the reader of an engine in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ...model.errors import AdapterError
from ...runtime.env.env import Env

FILES = ("adapter_config.json", "adapter_model.safetensors")


class StoredAdapter(Protocol):
    """What the store and the registry need to know of an adapter that was read."""

    @property
    def digest(self) -> str: ...
    @property
    def parent(self) -> str | None: ...
    @property
    def rank(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


class AdapterReader(Protocol):
    """Reads adapters, in this process or in another."""

    async def read(self, env: Env, path: Path, name: str, digest: str) -> StoredAdapter:
        """Reads the adapter of a folder; `digest` is that of an earlier load, or "".

        Raises `ModelError` or `OSError` for one that cannot be served or has another digest, `ThreadNotStarted`, and
        `Unavailable` while there is no process to read it.
        """


class ThreadReader:
    """Reads adapters in threads of this process."""

    def __init__(self, read: Callable[[Path, str], StoredAdapter]) -> None:
        """`read` reads an adapter from its folder, with the name for messages; it raises `ModelError`."""
        self._read = read

    async def read(self, env: Env, path: Path, name: str, digest: str) -> StoredAdapter:
        """As `AdapterReader.read`."""
        return await env.run_in_thread(self._read_whole, path, name, digest)

    def _read_whole(self, path: Path, name: str, known_digest: str) -> StoredAdapter:
        """Reads an adapter and what is derived from its tensors, which takes as long. Runs in a thread."""
        before = _versions(path)
        adapter = self._read(path, name)
        if _versions(path) != before:
            raise AdapterError(f"adapter '{name}': its files changed while they were read: try again in 10 s")
        digest, _, _ = adapter.digest, adapter.rank, adapter.num_bytes  # computed once, here
        if known_digest and digest != known_digest:
            raise AdapterError(
                f"adapter '{name}': its files are not those that it was loaded from; load it again with "
                "load_inplace, or put the files back"
            )
        return adapter


def size_on_disk(path: Path) -> int:
    """The size of an adapter's files; 0 if they are not there."""
    return sum(version[1] for version in _versions(path) if version is not None)


def _versions(path: Path) -> list[tuple[int, int, int] | None]:
    """(inode, size, time of change in ns) of each of an adapter's files; None for one that is not there."""
    found: list[tuple[int, int, int] | None] = []
    for name in FILES:
        try:
            status = os.stat(path / name)
        except OSError:
            found.append(None)
        else:
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return found
