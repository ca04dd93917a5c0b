"""A checkpoint's tensors with adapters merged into them, one tensor at a time, as they are read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..checkpoint.canonical import widened
from ..checkpoint.stored_tensors import StoredTensors
from ..named_tensors import StoredPiece
from .updates import Floats

Change = Callable[[Floats, Floats], Floats]  # the tensor so far, and that of the base, both in float32 -> the tensor


class MergedTensors:
    """The tensors of `base`, of which some are changed: a `StoredTensors`. A changed one is float32."""

    def __init__(
        self, base: StoredTensors, changes: Mapping[str, Sequence[Change]], read_again: Collection[str] = ()
    ) -> None:
        """`changes`: by the name of a tensor, in the order in which they are made.

        `read_again`: names that are read several times in a row, for parts of them. The last of these is kept.
        """
        self._base, self._changes, self._read_again = base, changes, read_again
        self._last: tuple[str, Floats] | None = None
        self.root: Path = base.root
        self.warnings, self.packing = base.warnings, base.packing

    @property
    def names(self) -> set[str]:
        return self._base.names

    def rename(self, new_name: Callable[[str], str]) -> None:
        raise NotImplementedError("adapters are merged by the names of a whole model")

    def share(self, name: str, other: str) -> None:
        self._base.share(name, other)

    def where(self, name: str) -> str:
        return self._base.where(name)

    def pieces(self, name: str) -> list[StoredPiece]:
        return self._base.pieces(name)

    def dtype(self, name: str) -> str:
        return "F32" if name in self._changes else self._base.dtype(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(name)

    def is_mapped(self, name: str) -> bool:
        return name not in self._changes and self._base.is_mapped(name)

    def array(self, name: str) -> NDArray[Any]:
        """The tensor. Raises AdapterError for an adapter's numbers that cannot be used."""
        if name not in self._changes:
            return self._base.array(name)
        if self._last is not None and self._last[0] == name:
            return self._last[1]
        self._last = None
        base = widened(self._base.array(name))
        tensor = base
        for change in self._changes[name]:
            tensor = change(tensor, base)
        if name in self._read_again:
            self._last = name, tensor
        return tensor

    def grouped(self, name: str) -> None:
        """None: a checkpoint that adapters are merged into has no packed matrices."""

    def forget(self, name: str) -> None:
        self._base.forget(name)
