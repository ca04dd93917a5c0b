"""Tensors of safetensors files that stay where they are: read by ranges, header first, then tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .chunked_file import CHUNK_BYTES, IN_FLIGHT, ChunkedFile
from .ranged_files import PinnedFile, RangedFiles
from .safetensors import RAW_DTYPES, Checkpoint, Shard


class StreamedCheckpoint(Checkpoint):
    """As `Checkpoint`, of files elsewhere. An array is a copy; the files must stay as they were pinned.

    Raises CheckpointError for a wrong header, and DownloadError for what cannot be read, at any access.
    """

    def __init__(
        self, root: Path, files: RangedFiles, pins: Mapping[str, PinnedFile], chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        threads = ThreadPoolExecutor(IN_FLIGHT, "millrace-stream")
        super().__init__(
            root,
            [_StreamedShard(ChunkedFile(files, name, pin, threads, chunk_bytes)) for name, pin in sorted(pins.items())],
        )

    def is_mapped(self, name: str) -> bool:
        return False


class _StreamedShard(Shard):
    def __init__(self, file: ChunkedFile) -> None:
        self.name, self._file = file.name, file
        self._read_header(file.size, file.peek)

    def raw(self, name: str) -> NDArray[Any]:
        entry = self.entries[name]
        content = np.frombuffer(self._file.read(entry.begin, entry.begin + entry.num_bytes), np.uint8)
        return content.view(RAW_DTYPES[entry.dtype]).reshape(entry.shape)

    def forget(self, name: str) -> None:
        entry = self.entries[name]
        self._file.release(entry.begin, entry.begin + entry.num_bytes)
