"""A file elsewhere as chunks: up to 8 requests in flight, and the next chunks read ahead of a reader in file order."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from .ranged_files import PinnedFile, RangedFiles

CHUNK_BYTES = 8 << 20
IN_FLIGHT = 8  # requests
KEPT = 2  # chunks behind the newest one: tensors share them


class ChunkedFile:
    """One pinned file. Holds at most `IN_FLIGHT + KEPT` chunks beyond what a read needs. For one reading thread."""

    def __init__(
        self,
        files: RangedFiles,
        name: str,
        pinned: PinnedFile,
        threads: ThreadPoolExecutor,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.name, self.size = name, pinned.size
        self._files, self._pinned, self._threads, self._chunk_bytes = files, pinned, threads, chunk_bytes
        self._chunks: dict[int, Future[bytes]] = {}

    def read(self, begin: int, end: int) -> bytearray:
        """Bytes [begin, end). Raises DownloadError."""
        content = bytearray(end - begin)
        if begin == end:
            return content
        position = 0
        for index in range(begin // self._chunk_bytes, (end - 1) // self._chunk_bytes + 1):
            self._read_ahead(index)
            offset = index * self._chunk_bytes
            part = memoryview(self._chunks[index].result())[max(0, begin - offset) : end - offset]
            content[position : position + len(part)] = part
            position += len(part)
            for old in [one for one in self._chunks if one < index - KEPT or one >= index + IN_FLIGHT]:
                self._chunks.pop(old).cancel()
        return content

    def release(self, begin: int, end: int) -> None:
        """Bytes [begin, end) are not needed any more: drops the chunks that hold nothing else."""
        size = self._chunk_bytes
        for index in [one for one in self._chunks if begin <= one * size and min((one + 1) * size, self.size) <= end]:
            self._chunks.pop(index).cancel()

    def peek(self, begin: int, end: int) -> bytes:
        """Bytes [begin, end), by a request of their own: without reading ahead."""
        return self._files.read(self.name, self._pinned, begin, end) if begin < end else b""

    def chunks(self, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """The file from the chunk at `start` on: (place, bytes) in order."""
        for begin in range(start, self.size, self._chunk_bytes):
            yield begin, bytes(self.read(begin, min(begin + self._chunk_bytes, self.size)))

    def _read_ahead(self, index: int) -> None:
        last = (self.size - 1) // self._chunk_bytes
        for one in range(index, min(index + IN_FLIGHT, last + 1)):
            if one not in self._chunks:
                begin = one * self._chunk_bytes
                end = min(begin + self._chunk_bytes, self.size)
                self._chunks[one] = self._threads.submit(self._files.read, self.name, self._pinned, begin, end)
