"""Tensors by name, where the names change: what all readers of checkpoints share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from .errors import CheckpointError
from .grouped_matrix import GroupedMatrix

P = TypeVar("P")


class StoredPiece(NamedTuple):
    """A part of a file that is read for a tensor."""

    stored: str  # name in the file
    file: str
    num_bytes: int


class NamedTensors(ABC, Generic[P]):
    """The tensors of a checkpoint in `root` by name; each has a place P, from which a reader takes it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.warnings: list[str] = []  # what is unusual about the files
        self.packing = ""  # how the matrices are packed, as users know it; empty: they are not
        self._places: dict[str, P] = {}

    @property
    def names(self) -> set[str]:
        return set(self._places)

    @abstractmethod
    def where(self, name: str) -> str:
        """The file or layer that holds a tensor, for error messages."""

    @abstractmethod
    def pieces(self, name: str) -> list[StoredPiece]:
        """What is read of the files for a tensor."""

    def grouped(self, name: str) -> GroupedMatrix | str | None:
        """A packed matrix as rows of codes, or why its codes cannot stay packed; None: it is not packed."""
        return None

    def rename(self, new_name: Callable[[str], str]) -> None:
        """Gives each tensor another name. Raises CheckpointError if two would have the same."""
        before: dict[str, str] = {}  # by new name
        for name in self._places:
            first = before.setdefault(new_name(name), name)
            if first != name:
                raise CheckpointError(
                    f"{self.where(name)} ({self.root}): tensors {first} and {name} are the same; keep one"
                )
        self._places = {new: self._places[name] for new, name in before.items()}

    def share(self, name: str, other: str) -> None:
        """Makes `name` the tensor that `other` is."""
        self._places[name] = self._places[other]
