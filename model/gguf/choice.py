"""Which of several GGUF files is meant: the same model often lies in one folder in many sizes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import CheckpointError, shown
from .reader import SPLIT

USUAL = "Q4_K_M"  # where none is asked for


def choose(names: Iterable[str], quant: str | None, where: str) -> list[str] | None:
    """The names of the parts of the one model that is meant; None if there is no GGUF file of a model.

    `quant` is a part of a file's name, as Q8_0; None: Q4_K_M if it is there, else the only one. Vision parts
    (mmproj) do not count. `where` names the folder or repository in errors. Raises CheckpointError if several files
    fit or none does.
    """
    models = models_of(names)
    if not models:
        return None
    wanted = [name for name in models if _is_meant(name, quant or USUAL)]
    if not wanted and quant is None and len(models) == 1:
        wanted = list(models)
    if len(wanted) == 1:
        return models[wanted[0]]
    problem = f"no file is {quant or USUAL}" if not wanted else f"{len(wanted)} files are {quant or USUAL}"
    listed = ", ".join(shown(name) for name in (wanted or models))
    raise CheckpointError(f"{where}: {problem}; choose one by a part of its name behind a colon: {listed}")


def models_of(names: Iterable[str]) -> dict[str, list[str]]:
    """The parts of each model among the files, by its name without the number of the part."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        file = name.rpartition("/")[2]
        if file.endswith(".gguf") and not file.startswith("mmproj"):
            match = SPLIT.fullmatch(file)
            models.setdefault(name.removesuffix(file) + (match[1] if match else file), []).append(name)
    return models


def _is_meant(name: str, quant: str) -> bool:
    """Whether `quant` stands in the name as a word of its own, in capital or small letters."""
    return re.search(rf"(?<![A-Za-z0-9_]){re.escape(quant)}(?![A-Za-z0-9_])", name, re.IGNORECASE) is not None
