"""A checkpoint's tensors, of which is told how many bytes of which file have been read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from ..grouped_matrix import GroupedMatrix
from ..named_tensors import StoredPiece
from .tensor_shapes import TensorSource


class ReadProgress(Protocol):
    """Where the bytes are told, by the names of files."""

    def expect(self, file_bytes: Mapping[str, int]) -> None:
        """The bytes of each file that will be read."""

    def add(self, file: str, num_bytes: int) -> None:
        """More bytes of a file are read."""


class CountedTensors:
    """A `TensorSource` that tells each stored tensor's bytes once, when a tensor made of it is forgotten."""

    def __init__(self, source: TensorSource, names: Iterable[str], progress: ReadProgress) -> None:
        """`names` are the canonical tensors that will be read."""
        self.warnings, self.packing = source.warnings, source.packing
        self._source, self._progress = source, progress
        self._left = {piece.stored: (piece.file, piece.num_bytes) for name in names for piece in source.pieces(name)}
        totals: Counter[str] = Counter()
        for file, num_bytes in self._left.values():
            totals[file] += num_bytes
        progress.expect(totals)

    def pieces(self, name: str) -> list[StoredPiece]:
        return self._source.pieces(name)

    def is_mapped(self, name: str) -> bool:
        return self._source.is_mapped(name)

    def stored_name(self, name: str) -> str:
        return self._source.stored_name(name)

    def array(self, name: str) -> NDArray[Any]:
        return self._source.array(name)

    def grouped(self, name: str) -> GroupedMatrix | str | None:
        return self._source.grouped(name)

    def forget(self, name: str) -> None:
        self._source.forget(name)
        self.note_read([name])

    def note_read(self, names: Iterable[str]) -> None:
        """Tensors have been read whose memory others release."""
        for name in names:
            for piece in self._source.pieces(name):
                file, num_bytes = self._left.pop(piece.stored, ("", 0))
                if num_bytes:
                    self._progress.add(file, num_bytes)
