"""The pooling of a checkpoint: which positions of a text make its embedding, and the lengths it may be cut to.

Read from the files that sentence-transformers writes beside a model (`modules.json`, `1_Pooling/config.json`) and from
config.json. Does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import CheckpointError
from .files import read_json, read_text

PoolingKind = Literal["last", "mean", "cls"]

_MODES: dict[str, PoolingKind] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """How a model's embeddings are made, from the checkpoint.

    The embeddings of a "matryoshka" model may be cut: to the lengths in `dimensions`, or to any length if that is
    empty. None = they cannot be cut.
    """

    kind: PoolingKind
    size: int  # numbers in a whole embedding
    dimensions: tuple[int, ...] | None = None

    def allows(self, dimensions: int) -> bool:
        """Whether embeddings may be cut to `dimensions` numbers."""
        if dimensions == self.size:
            return True
        if self.dimensions is None or not 1 <= dimensions <= self.size:
            return False
        return not self.dimensions or dimensions in self.dimensions

    def describe_dimensions(self) -> str:
        """The allowed lengths, for an error message."""
        if self.dimensions is None:
            return f"this model's embeddings have {self.size} numbers and were not trained to be cut; leave it out"
        if self.dimensions:
            return f"must be one of {', '.join(map(str, self.dimensions))}, or {self.size}"
        return f"must be from 1 to {self.size}"


def read_pooling(root: Path, size: int, default: PoolingKind, override: PoolingKind | None = None) -> PoolingConfig:
    """The pooling of the checkpoint in `root`, whose hidden states have `size` numbers.

    `override` replaces the checkpoint's pooling; `default` applies if it has none. Raises CheckpointError for modules
    and modes that are not supported.
    """
    folder = _pooling_folder(root)
    kind = override or (None if folder is None else _kind(root, folder)) or default
    return PoolingConfig(kind=kind, size=size, dimensions=_dimensions(root, size))


def longest_text(root: Path) -> int | None:
    """The number of tokens that sentence-transformers cuts texts to for this model; None if there is no limit."""
    values = read_json(root, "sentence_bert_config.json") or {}
    length = values.get("max_seq_length")
    return length if isinstance(length, int) and not isinstance(length, bool) and length > 0 else None


def _pooling_folder(root: Path) -> str | None:
    """The folder of the pooling configuration, from modules.json; None if it names none.

    Raises CheckpointError for other modules, unless they leave embeddings' directions unchanged.
    """
    text = read_text(root, "modules.json")
    if text is None:
        return None
    source, folder = f"modules.json ({root})", None
    try:
        modules = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: not valid JSON: {error}") from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{source}: must hold a list of modules")
    for module in modules:
        kind, path = str(module.get("type")).rpartition(".")[2], module.get("path", "")
        if kind == "Pooling" and isinstance(path, str):
            folder = path
        elif kind not in ("Transformer", "Normalize"):
            raise CheckpointError(
                f"{source}: module {kind[:64]!r} is not supported, and embeddings would be wrong without it; "
                "supported: Transformer, Pooling, Normalize"
            )
    return folder


def _kind(root: Path, folder: str) -> PoolingKind:
    name = f"{folder}/config.json"
    values = read_json(root, name) or {}
    chosen = [mode for mode, is_on in values.items() if mode.startswith("pooling_mode_") and is_on is True]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        shown = ", ".join(chosen) or "none"
        raise CheckpointError(
            f"{name} ({root}): pooling modes {shown[:128]}: exactly one of {', '.join(_MODES)} is supported; "
            "say which with pooling = last, mean or cls"
        )
    return _MODES[chosen[0]]


def _dimensions(root: Path, size: int) -> tuple[int, ...] | None:
    values: Mapping[str, Any] = read_json(root, "config.json") or {}
    listed = values.get("matryoshka_dimensions")
    if isinstance(listed, list) and listed:
        if not all(type(item) is int and 1 <= item <= size for item in listed):
            raise CheckpointError(f"config.json ({root}): matryoshka_dimensions: must list lengths from 1 to {size}")
        return tuple(sorted(listed))
    return () if values.get("is_matryoshka") is True else None
