"""An adapter's safetensors file, and pauses of the thread that reads it beside steps."""

from __future__ import annotations

import os
import stat
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint.safetensors import RAW_DTYPES, Shard
from ..errors import CheckpointError
from ..files import checkpoint_file

EVERY_S = 0.0004  # below Linux's least time slice of 0.7 ms, after which a thread may lose its CPU with the lock held
PAUSE_S = 0.00005  # long enough for a thread that waits for the lock to take it


class Pauses:
    """Called between small pieces of work in Python; sleeps for a moment if it has not done so for `EVERY_S`.

    So the thread holds the interpreter lock for short times only, and threads that compute steps do not wait for it.
    """

    def __init__(self) -> None:
        self._last_s = time.perf_counter()

    def __call__(self) -> None:
        if time.perf_counter() - self._last_s > EVERY_S:
            time.sleep(PAUSE_S)
            self._last_s = time.perf_counter()


class ReadFile(Shard):
    """A safetensors file that is read tensor by tensor: a file that is cut under a map would end the process."""

    def __init__(self, root: Path, name: str, pause: Pauses) -> None:
        self.name, self._pause = name, pause
        path = checkpoint_file(root, name)
        assert path is not None, "the caller has seen it"
        try:
            # a link or a pipe that took its place since is not followed, and not waited for
            self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise CheckpointError(f"{name} ({root}): cannot be read: {error.strerror}") from None
        weakref.finalize(self, os.close, self._fd)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{name} ({root}): is no regular file any more; copy the file in its place")
        self._read_header(status.st_size, lambda begin, end: bytes(self.read(begin, end)))

    def raw(self, name: str) -> NDArray[Any]:
        entry = self.entries[name]
        content = np.frombuffer(self.read(entry.begin, entry.begin + entry.num_bytes), np.uint8)
        return content.view(RAW_DTYPES[entry.dtype]).reshape(entry.shape)

    def forget(self, name: str) -> None:
        pass

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._pause()  # called for each tensor while the header is parsed
        return super()._object(pairs)

    def _shape(self, name: str, value: dict[str, Any]) -> tuple[int, ...]:
        self._pause()  # called for each tensor of the header
        return super()._shape(name, value)

    def read(self, begin: int, end: int) -> bytearray:
        """A range of the file."""
        content, num_read = bytearray(end - begin), 0
        try:
            while num_read < len(content):
                count = os.preadv(self._fd, [memoryview(content)[num_read:]], begin + num_read)
                if not count:
                    raise CheckpointError(f"{self.name}: was cut while it was read; load it again")
                num_read += count
        except OSError as error:
            raise CheckpointError(f"{self.name}: cannot be read: {error.strerror}") from None
        return content
