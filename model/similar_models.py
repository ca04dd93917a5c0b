"""Which model of this machine was meant by a name that leads to none."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

BUNDLED = "demo"
MOST_ENTRIES = 1_000  # of a folder that are looked at
ALIKE = 0.75  # of two names, from 0 to 1: a letter of four may differ


def similar_model(model: str, cache: Path | None = None) -> str:
    """` (did you mean X?)` with the model here whose name is most like `model`, or the empty string.

    X is the bundled model, a model's folder or GGUF file beside the path that `model` is, or a Hub id in `cache`. Case
    counts for nothing.
    """
    known = {name.lower(): name for name in (*_in_cache(cache), *_beside(model), BUNDLED)}
    found = difflib.get_close_matches(model.lower(), known, n=1, cutoff=ALIKE)
    return f" (did you mean {known[found[0]]}?)" if found else ""


def _beside(model: str) -> Iterator[str]:
    """The models in the folder where `model` would be, as they would be written in its place."""
    folder, name = os.path.split(model.rstrip("/"))
    for entry in _entries(os.path.expanduser(folder) or "."):
        is_model = entry.name.endswith(".gguf") or os.path.exists(os.path.join(entry.path, "config.json"))
        if is_model and entry.name != name:
            yield os.path.join(folder, entry.name)


def _in_cache(cache: Path | None) -> Iterator[str]:
    """The Hub ids that a cache has."""
    for entry in _entries(cache) if cache is not None else ():
        if entry.name.startswith("models--"):
            yield entry.name.removeprefix("models--").replace("--", "/")


def _entries(folder: str | Path) -> Iterable[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(islice(entries, MOST_ENTRIES))
    except (OSError, ValueError):  # no folder, or no name of one
        return ()
