"""Opens a checkpoint's files: only regular files of bounded size inside the checkpoint.

A Hub cache stores a snapshot as symlinks into its `blobs` folder; those are followed. Any other link out of the
checkpoint is refused, with the same message whether its target exists or not, unless the folder is a `LinkedFolder`.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path, PosixPath
from typing import Any

from .errors import CheckpointError, shown

FILE_BYTES = 256 << 20  # largest file read whole: a tokenizer.json of 256k entries takes about 35 MB
JSON_BYTES = 8 << 20  # largest file parsed into Python objects, which take up to 25 times its size


class LinkedFolder(PosixPath):
    """A checkpoint's folder whose links may lead anywhere: setting `allow_links_outside`.

    `checkpoint_file` takes it as the folder of any other checkpoint, so no other code treats it differently.
    """


def checkpoint_file(root: Path, name: str) -> Path | None:
    """The real path of `root/name`, or None when there is no such file.

    Raises CheckpointError for a link that leaves the checkpoint and for anything but a regular file (a FIFO, a device,
    a directory), before opening it.
    """
    path = root / name
    try:
        if not path.is_symlink() and not path.exists():
            return None
        real = path.resolve()
        if not isinstance(root, LinkedFolder) and not any(
            real.is_relative_to(place) for place in _allowed_places(root)
        ):
            raise CheckpointError(
                f"{name} ({root}): a link that leads out of the checkpoint; copy the file in its place, or trust this "
                "folder's links with allow_links_outside"
            )
        mode = real.stat().st_mode
    except OSError as error:
        raise CheckpointError(f"{name} ({root}): cannot be read: {error.strerror}") from None
    except (RuntimeError, ValueError) as error:  # a link to itself, before Python 3.13; a name that no file can have
        raise CheckpointError(f"{name} ({root}): cannot be read: {error}") from None
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{name} ({root}): must be a regular file, not a {_kind(mode)}")
    return real


def read_json(root: Path, name: str) -> dict[str, Any] | None:
    """The JSON object in `root/name`, or None when there is no such file. Raises CheckpointError if it is not one."""
    raw = read_bytes(root, name, JSON_BYTES)
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
    raw = read_bytes(root, name, JSON_BYTES)
    try:
        return None if raw is None else raw.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{name} ({root}): not valid UTF-8: {error.reason} at byte {error.start}") from None


def read_bytes(root: Path, name: str, most: int = FILE_BYTES) -> bytes | None:
    """The content of `root/name`, or None when there is no such file. Raises CheckpointError for more than `most`."""
    path = checkpoint_file(root, name)
    if path is None:
        return None
    try:
        size = path.stat().st_size
        if size > most:
            raise CheckpointError(f"{name} ({root}): {size} bytes, and at most {most} are read")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{name} ({root}): cannot be read: {error.strerror}") from None


def refuse_code(root: Path, name: str, values: dict[str, Any]) -> None:
    """Raises CheckpointError if a configuration, at any depth, names code or an attention function to load.

    An `auto_map` of the classes that transformers has for the `model_type` beside it is no reason: they were code of
    the checkpoint before transformers had them.
    """
    waiting: list[tuple[str, Any]] = [("", values)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, list):
            waiting += [(path, child) for child in value if isinstance(child, dict | list)]
            continue
        for key, child in value.items():
            if key == "auto_map" and _is_built_in(child, value.get("model_type")):
                continue
            if key in ("auto_map", "_attn_implementation_internal", "custom_pipelines") and child:
                raise CheckpointError(
                    f"{name} ({root}): {shown(path + key)} requires code outside this program, which is never run; "
                    "use a checkpoint whose architecture is built in, and remove the key"
                )
            if isinstance(child, dict | list):
                waiting.append((f"{path[-64:]}{key[:64]}.", child))


def _is_built_in(auto_map: Any, model_type: Any) -> bool:
    """Whether a map names only classes that are called as the model type, as `modeling_phi3.Phi3ForCausalLM`."""
    if not isinstance(auto_map, dict) or not isinstance(model_type, str):
        return False
    stem = model_type.replace("_", "").replace("-", "").lower()
    endings = ("config", "model", "forcausallm", "lmheadmodel", "forsequenceclassification", "fortokenclassification")
    classes = [child for key, child in auto_map.items() if key != "AutoTokenizer"]  # tokenizer_config.json decides
    return all(
        isinstance(child, str) and child.rpartition(".")[2].lower() in [stem + ending for ending in endings]
        for child in classes
    )


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
