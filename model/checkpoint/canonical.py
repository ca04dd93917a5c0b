"""A checkpoint's tensors under their canonical names: rows taken out of fused ones, orders put right. No torch.

`families/names.py` has the canonical names, and how a family says where they come from.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..families.names import Names, Rows, Shape, Target
from ..grouped_matrix import GroupedMatrix
from ..named_tensors import StoredPiece
from .safetensors import BFLOAT16
from .stored_tensors import StoredTensors

# In canonical names: of what packed files may hold by itself where the family has one tensor of several
STORED_APART = ("experts.", ".recurrent.", ".mlp.", ".self_attn.")


class TensorSources:
    """Where each canonical tensor of a decoder lies in its checkpoint."""

    def __init__(self, targets: Iterable[Target], names: Names, stored: Container[str] = ()) -> None:
        """`stored`: names of the file's tensors, some of which may be canonical instead of the family's."""
        self.targets = {target.name: target for target in targets}
        self._parts = {name: _parts_of(name, names) for name in self.targets}
        of_family = {part.stem for parts in self._parts.values() for part in parts}
        for name, parts in self._parts.items():
            is_apart = any(part in name for part in STORED_APART) and name in stored and name not in of_family
            if is_apart and not all(part.stem in stored for part in parts):
                self._parts[name] = (Rows(name, suffix=""),)

    def parts(self, name: str) -> tuple[Rows, ...]:
        """The parts of a canonical tensor; their stems are whole names in the checkpoint."""
        return self._parts[name]

    def stored_name(self, name: str) -> str:
        """The name in the checkpoint of a canonical tensor, or of its first part."""
        return self._parts[name][0].stem

    def canonical_name(self, stored: str) -> str:
        """A canonical tensor that is made of the stored one."""
        return next(name for name, parts in self._parts.items() if any(part.stem == stored for part in parts))

    def stored_shapes(self) -> dict[str, Shape]:
        """The name and shape of each tensor that the checkpoint must hold: up to the last row that a part takes."""
        shapes: dict[str, Shape] = {}
        ends: dict[str, int] = {}
        for name, target in self.targets.items():
            parts = self._parts[name]
            for part in parts:
                end = target.shape[0] if len(parts) == 1 else 1
                end = end if part.rows is None else _end(part.rows)
                ends[part.stem] = max(ends.get(part.stem, 0), end)
                shape = part.shape or (ends[part.stem], *target.shape[1:])
                shape = shape[::-1] if part.is_transposed else shape
                shapes[part.stem] = (part.num_stacked, *shape) if part.num_stacked else shape
        return shapes


class CanonicalTensors:
    """The tensors of a checkpoint by their canonical names: a `TensorSource`."""

    def __init__(self, checkpoint: StoredTensors, sources: TensorSources) -> None:
        self._checkpoint, self._sources = checkpoint, sources
        self.warnings, self.packing = checkpoint.warnings, checkpoint.packing

    def stored_name(self, name: str) -> str:
        return self._sources.stored_name(name)

    def pieces(self, name: str) -> list[StoredPiece]:
        return [piece for part in self._sources.parts(name) for piece in self._checkpoint.pieces(part.stem)]

    def is_mapped(self, name: str) -> bool:
        parts = self._sources.parts(name)
        part = parts[0]
        if len(parts) > 1 or part.is_transposed or part.apply is not None or self._adds_one(name):
            return False
        is_run = part.rows is None or (isinstance(part.rows, slice) and part.rows.step in (None, 1))
        return is_run and self._checkpoint.is_mapped(part.stem)

    def array(self, name: str) -> NDArray[Any]:
        parts = self._sources.parts(name)
        array = self._part(parts[0]) if len(parts) == 1 else np.concatenate([self._part(part) for part in parts])
        return widened(array) + np.float32(1.0) if self._adds_one(name) else array

    def grouped(self, name: str) -> GroupedMatrix | str | None:
        """As `StoredTensors.grouped`, of the canonical tensor."""
        parts = self._sources.parts(name)
        part, matrix = parts[0], self._checkpoint.grouped(parts[0].stem)
        if matrix is None or isinstance(matrix, str):
            return matrix
        if len(parts) > 1 or part.is_transposed or part.apply is not None or part.shape is not None:
            return "its numbers are not rows of one stored matrix"
        return matrix if part.rows is None else matrix.picked(part.rows)

    def forget(self, name: str) -> None:
        for part in self._sources.parts(name):
            self._checkpoint.forget(part.stem)

    def _part(self, part: Rows) -> NDArray[Any]:
        stored = self._checkpoint.array(part.stem)
        if part.own is not None:
            stored = stored[part.own]
        if part.is_transposed and stored.ndim == 2:
            stored = stored.T
        if part.shape is not None:
            stored = stored.reshape(-1)
        if part.rows is not None:
            stored = stored[part.rows]
        if part.apply is not None:
            stored = part.apply(widened(stored))
        return np.ascontiguousarray(stored)

    def _adds_one(self, name: str) -> bool:
        norm = self._sources.targets[name].norm
        return norm is not None and norm.weight == "one_plus" and name.endswith(".weight")


def widened(array: NDArray[Any]) -> NDArray[np.float32]:
    """The numbers of a stored tensor in float32."""
    if array.dtype == BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def _parts_of(name: str, names: Names) -> tuple[Rows, ...]:
    stem, dot, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        stem, dot, suffix = name, "", ""
    pieces = stem.split(".")
    numbers = [piece for piece in pieces if piece.isdigit()]  # of the layer and of the expert
    pattern = ".".join("*" if piece.isdigit() else piece for piece in pieces)
    source = names.get(f"{pattern}{dot}{suffix}") or names.get(pattern, pattern)
    parts = (Rows(source),) if isinstance(source, str) else (source,) if isinstance(source, Rows) else source
    found = []
    for part in parts:
        end = f"{dot}{suffix}" if part.suffix is None else part.suffix
        stored = part.stem
        for number in numbers[: stored.count("*")]:
            stored = stored.replace("*", number, 1)
        own = int(numbers[1]) if part.num_stacked else None
        found.append(replace(part, stem=stored + end, suffix="", own=own))
    return tuple(found)


def _end(rows: slice | NDArray[np.int64]) -> int:
    """Behind the last of the rows."""
    return int(rows.stop if isinstance(rows, slice) else rows.max() + 1)
