"""Opens a checkpoint's files: only regular files of bounded size inside the checkpoint.

A Hub cache stores a snapshot as symlinks into its `blobs` folder; those are followed. Any other link out of the
checkpoint is refused, with the same message whether its target exists or not.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from .errors import CheckpointError

JSON_BYTES = 256 << 20  # largest JSON file read: a tokenizer.json of 256k entries takes about 35 MB


def checkpoint_file(root: Path, name: str) -> Path | None:
    """The real path of `root/name`, or None when there is no such file.

    Raises CheckpointError for a link that leaves the checkpoint and for anything but a regular file (a FIFO, a device,
    a directory), before opening it.
    """
    path = root / name
    if not path.is_symlink() and not path.exists():
        return None
    real = path.resolve()
    if not any(real.is_relative_to(place) for place in _allowed_places(root)):
        raise CheckpointError(f"{name} ({root}): a link that leads out of the checkpoint; copy the file in its place")
    try:
        mode = real.stat().st_mode
    except OSError as error:
        raise CheckpointError(f"{name} ({root}): cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{name} ({root}): must be a regular file, not a {_kind(mode)}")
    return real


def read_json(root: Path, name: str) -> dict[str, Any] | None:
    """The JSON object in `root/name`, or None when there is no such file. Raises CheckpointError if it is not one."""
    raw = read_bytes(root, name)
    if raw is None:
        return None
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} ({root}): not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} ({root}): must hold a JSON object, not a {type(value).__name__}")
    return value


def read_text(root: Path, name: str) -> str | None:
    """The UTF-8 text of `root/name`, or None when there is no such file."""
    path = _bounded_file(root, name)
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{name} ({root}): not valid UTF-8: {error.reason} at byte {error.start}") from None


def read_bytes(root: Path, name: str) -> bytes | None:
    """The content of `root/name`, or None when there is no such file."""
    path = _bounded_file(root, name)
    return None if path is None else path.read_bytes()


def refuse_code(root: Path, name: str, values: dict[str, Any], path: str = "") -> None:
    """Raises CheckpointError if a configuration, at any depth, names code or an attention function to load."""
    for key, value in values.items():
        if key in ("auto_map", "_attn_implementation_internal", "custom_pipelines") and value:
            raise CheckpointError(
                f"{name} ({root}): {path}{key} requires code outside this program, which is never run; "
                "use a checkpoint whose architecture is built in, and remove the key"
            )
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, dict):
                refuse_code(root, name, child, f"{path}{key}.")


def _bounded_file(root: Path, name: str) -> Path | None:
    """As `checkpoint_file`, for a file to be read whole. Raises CheckpointError if it is larger than JSON_BYTES."""
    path = checkpoint_file(root, name)
    size = 0 if path is None else path.stat().st_size
    if size > JSON_BYTES:
        raise CheckpointError(f"{name} ({root}): {size} bytes, and at most {JSON_BYTES} are read")
    return path


def _allowed_places(root: Path) -> list[Path]:
    """The folders that files may resolve to: the checkpoint, and the blobs of the Hub cache it is in."""
    real = root.resolve()
    places = [real]
    repository = real.parent.parent
    if real.parent.name == "snapshots" and repository.name.startswith("models--"):
        places.append(repository / "blobs")
    return places


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "directory", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")
