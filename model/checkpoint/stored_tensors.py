"""What the files of a checkpoint offer: tensors by the names that are stored in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from ..grouped_matrix import GroupedMatrix
from ..named_tensors import StoredPiece

MEMBERS = (  # of the protocol
    *("root", "warnings", "names", "rename", "share"),
    *("where", "pieces", "dtype", "shape", "is_mapped", "array", "forget"),
)


class StoredTensors(Protocol):
    """A checkpoint's tensors: of safetensors (`safetensors.Checkpoint`), or of GGUF files (`gguf.GgufCheckpoint`)."""

    root: Path
    warnings: list[str]  # what is unusual about the files
    packing: str  # how the matrices are packed, as users know it; empty: they are not

    @property
    def names(self) -> set[str]: ...

    def rename(self, new_name: Callable[[str], str]) -> None:
        """Gives each tensor another name. Raises CheckpointError if two would have the same."""

    def share(self, name: str, other: str) -> None:
        """Makes `name` the tensor that `other` is."""

    def where(self, name: str) -> str:
        """The file that holds a tensor, for error messages."""

    def pieces(self, name: str) -> list[StoredPiece]:
        """What is read of the files for a tensor."""

    def dtype(self, name: str) -> str:
        """The dtype of `array` by safetensors' name."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def is_mapped(self, name: str) -> bool:
        """Whether `array` is a view of a file's map, which takes no memory before it is read."""

    def array(self, name: str) -> NDArray[Any]:
        """The tensor. Do not write to it."""

    def grouped(self, name: str) -> GroupedMatrix | str | None:
        """A packed matrix as rows of codes, or why its codes cannot stay packed; None: it is not packed."""

    def forget(self, name: str) -> None:
        """Drops the tensor's pages from this process. A later access reads them again."""
