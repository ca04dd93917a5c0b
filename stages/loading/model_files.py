"""Digests of a model's files: a successor of an engine process must load the files that its predecessor did.

Other weights would go on with the answers of the first ones, in the middle, and no client would know.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from ...model.checkpoint.hub import FILES
from ...model.errors import CheckpointError

WHOLE_BYTES = 64 << 20  # files up to this size are read whole
SAMPLE_BYTES, SAMPLE_EVERY = 4 << 10, 1 << 20  # of larger ones; of these also the time of the last change counts


def file_digests(root: Path, *, with_times: bool = True) -> dict[str, str]:
    """A digest of each file from which a model in the folder `root` may be loaded, by name.

    `with_times` False: of copies on different machines, which were written at different times.
    """
    paths = sorted({path for pattern in FILES for path in root.glob(pattern) if path.is_file()})
    return {path.name: _digest(path, with_times) for path in paths}


def check_same_files(found: Mapping[str, str], first: Mapping[str, str]) -> None:
    """Raises `CheckpointError` if the files differ from those that were loaded first."""
    for name in sorted({*found, *first}):
        if found.get(name) != first.get(name):
            what = "is gone" if name not in found else "is new" if name not in first else "was replaced or written to"
            raise CheckpointError(
                f"{name} {what} since the engine first loaded this model, and answers in progress must not go on with "
                "another one: put the file back, or restart the server"
            )


def _digest(path: Path, with_times: bool) -> str:
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        digest.update(b"%d" % stat.st_size)
        if stat.st_size <= WHOLE_BYTES:
            while part := file.read(SAMPLE_EVERY):
                digest.update(part)
        else:
            if with_times:
                digest.update(b" %d" % stat.st_mtime_ns)
            for start in (*range(0, stat.st_size, SAMPLE_EVERY), stat.st_size - SAMPLE_BYTES):
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, start))
    return digest.hexdigest()
