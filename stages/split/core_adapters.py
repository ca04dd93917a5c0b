"""The adapters in the engine process's memory, which it reads and frees as the front process says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...model.errors import ModelError
from ...runtime.env.env import Env
from ...runtime.workers.thread_start import ThreadNotStarted
from ..adapters.reader import StoredAdapter, ThreadReader
from .protocol import AdapterCard, DropAdapter, ReadAdapter


class CoreAdapters:
    """The adapters by digest.

    The front process bounds their number, and knows the requests that use them. It may drop an adapter that a plan
    still loads for a request which it has cancelled, so an adapter is freed once it has no device slot. It may also
    drop one that is being read again, which it does not know yet: its word then names an earlier residence.
    """

    def __init__(self, read: Callable[[Path, str], StoredAdapter], has_slot: Callable[[str], bool]) -> None:
        self._reader = ThreadReader(read)
        self._has_slot = has_slot
        self._adapters: dict[str, StoredAdapter] = {}
        self._residences: dict[str, int] = {}  # the number of the last read of each, in the order in which they ended
        self._num_reads = 0
        self._dropped: set[str] = set()  # to be freed

    def __len__(self) -> int:
        return len(self._adapters)

    def get(self, digest: str) -> StoredAdapter:
        """An adapter that a step loads. Raises `KeyError` if it was dropped, with all requests that wait for it."""
        return self._adapters[digest]

    async def read(self, env: Env, word: ReadAdapter) -> AdapterCard:
        """Reads an adapter; the front process may send its requests once it has the answer."""
        self._free()
        try:
            adapter = await self._reader.read(env, Path(word.path), word.name, word.digest)
        except ThreadNotStarted:
            return AdapterCard(lacks_thread=True)
        except (ModelError, OSError) as error:
            return AdapterCard(error=str(error) or type(error).__name__)
        self._adapters.setdefault(adapter.digest, adapter)
        self._dropped.discard(adapter.digest)
        self._num_reads += 1
        residence = self._residences[adapter.digest] = self._num_reads
        return AdapterCard(adapter.digest, adapter.parent, adapter.rank, adapter.num_bytes, residence=residence)

    def drop(self, word: DropAdapter) -> None:
        """Frees an adapter, at once or at a later call, unless a read has stored it after the one that is meant."""
        if self._residences.get(word.digest) == word.residence:
            self._dropped.add(word.digest)
        self._free()

    def _free(self) -> None:
        for digest in [each for each in self._dropped if not self._has_slot(each)]:
            self._dropped.remove(digest)
            del self._adapters[digest], self._residences[digest]
