"""Files that a command writes when its work is done: checked before the work begins, which may take minutes."""

from __future__ import annotations

import os
from pathlib import Path

from ..runtime.env.writable import file_problem
from ..stages.errors import ConfigError


def check_output_file(flag: str, file: Path | None, *, makes_folder: bool = False) -> None:
    """Raises `ConfigError` if `file` could not be written. None: nothing is to be written.

    An existing file stays as it is until `write_output_file`. With `makes_folder` a missing folder is made.
    """
    if file is None:
        return
    if file.exists() and not file.is_dir():  # also a device or a pipe, whose folder may be read-only
        problem = None if os.access(file, os.W_OK) else "cannot be written by this user; name another file"
    else:
        if makes_folder:
            _make_folder(flag, file.parent)
        problem = file_problem(file)
    if problem is not None:
        raise ConfigError(f"{flag} {file}: {problem}")


def write_output_file(flag: str, file: Path, content: bytes) -> None:
    """Writes the file. Raises `ConfigError`, as on a disk that has become full."""
    try:
        file.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{flag} {file}: {error.strerror or error}; name another file") from None


def _make_folder(flag: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {folder}: {error.strerror or error}; name another folder") from None
