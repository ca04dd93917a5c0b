"""The other GGUF files beside one: what might be served in its place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..files import read_json
from .choice import models_of
from .folder import is_gguf_folder

MOST_SIBLINGS = 64  # told at most


def model_bytes(sizes: Mapping[str, int]) -> dict[str, int]:
    """The bytes of each model among GGUF files, whose sizes are given by name; parts of one model count together."""
    return {name: sum(sizes[part] for part in parts) for name, parts in models_of(sizes).items()}


def local_siblings(root: Path) -> tuple[str, dict[str, int]]:
    """The model that the folder `root` stands for, and the bytes of all models in the folder of its file."""
    files = (read_json(root, "gguf.json") or {}).get("files") if is_gguf_folder(root) else None
    if not files:
        return "", {}
    first = Path(files[0]["path"])
    sizes = {path.name: path.stat().st_size for path in sorted(first.parent.glob("*.gguf"))[:MOST_SIBLINGS]}
    own = next((name for name, parts in models_of(sizes).items() if first.name in parts), "")
    return own, model_bytes(sizes)
