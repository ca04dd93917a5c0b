"""A quantized checkpoint as if it were not quantized: packed layers are unpacked on access, in float32."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

from ..errors import CheckpointError
from ..grouped_matrix import GroupedMatrix
from ..named_tensors import NamedTensors, StoredPiece
from .formats import WeightFormat
from .mxfp4 import Mxfp4
from .parts import Parts, Stored

WEIGHT = ".weight"
# Of the KV cache, or of what attention computes: beside the layers, or with the packed ones' suffixes.
SCALE_OF_ATTENTION = re.compile(r"(.+\.)?(self_attn|attn|attention)\.(attn\.)?(q|k|v|kv|prob)_(scale|zero_point)")
Read = TypeVar("Read")


class StoredCheckpoint(Stored, Protocol):
    """What is needed of `checkpoint.safetensors.Checkpoint`."""

    root: Path
    warnings: list[str]

    @property
    def names(self) -> set[str]: ...
    def where(self, name: str) -> str: ...
    def pieces(self, name: str) -> list[StoredPiece]: ...
    def is_mapped(self, name: str) -> bool: ...
    def array(self, name: str) -> NDArray[Any]: ...
    def forget(self, name: str) -> None: ...


class UnpackedCheckpoint(NamedTensors[str | Parts]):
    """The tensors by the names of an unquantized checkpoint: a `StoredTensors`."""

    def __init__(self, stored: StoredCheckpoint, weights: WeightFormat) -> None:
        super().__init__(stored.root)
        self.warnings = stored.warnings
        self.format, self.packing = weights, weights.name
        self._stored = stored
        stored_names = stored.names
        stems = {name.removesuffix(mark) for mark in weights.marks for name in stored_names if name.endswith(mark)}
        layers: dict[str, Parts] = {stem: self._parts(stem, stored_names) for stem in stems}
        taken = {f"{stem}{suffix}" for stem in layers for suffix in weights.suffixes}
        taken |= {name for name in stored_names if SCALE_OF_ATTENTION.fullmatch(name)}
        self._places = {name: name for name in stored_names - taken}
        if isinstance(weights, Mxfp4):
            layers = {expert.stem: expert for stack in layers.values() for expert in weights.experts_of(stack)}
        self._places |= {f"{stem}{WEIGHT}": parts for stem, parts in layers.items()}
        if not layers:
            raise CheckpointError(
                f"{self.root}: config.json says {weights.name}, and no tensor ends in {' or '.join(weights.marks)}"
            )

    def _parts(self, stem: str, stored_names: set[str]) -> Parts:
        names = {suffix: f"{stem}{suffix}" for suffix in self.format.suffixes if f"{stem}{suffix}" in stored_names}
        return Parts(self._stored, stem, names)

    def where(self, name: str) -> str:
        """The file that holds a tensor, for error messages."""
        place = self._places[name]
        return self._stored.where(place) if isinstance(place, str) else f"layer {place.stem}"

    def pieces(self, name: str) -> list[StoredPiece]:
        place = self._places[name]
        names = (place,) if isinstance(place, str) else place.names
        return [piece for stored in names for piece in self._stored.pieces(stored)]

    def dtype(self, name: str) -> str:
        """The dtype of `array`."""
        place = self._places[name]
        return self._stored.dtype(place) if isinstance(place, str) else "F32"

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places[name]
        return self._stored.shape(place) if isinstance(place, str) else self._fitting(self.format.shape, place)

    def is_mapped(self, name: str) -> bool:
        place = self._places[name]
        return isinstance(place, str) and self._stored.is_mapped(place)

    def array(self, name: str) -> NDArray[Any]:
        """The tensor; that of a packed layer in float32."""
        place = self._places[name]
        if isinstance(place, str):
            return self._stored.array(place)
        weight, shape = self._fitting(self.format.unpack, place), self.shape(name)
        if weight.shape != shape:
            place.fail(f"its weight is {list(weight.shape)}, not {list(shape)}")
        return weight

    def grouped(self, name: str) -> GroupedMatrix | str | None:
        """A packed layer as rows of codes, or why its codes cannot stay packed; None: the layer is not packed."""
        place = self._places[name]
        return None if isinstance(place, str) else self._fitting(self.format.grouped, place)

    @staticmethod
    def _fitting(read: Callable[[Parts], Read], parts: Parts) -> Read:
        """What is read of a layer. Raises CheckpointError for tensors of axes, types or lengths that make none."""
        try:
            return read(parts)
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            shapes = ", ".join(f"{suffix} {parts.dtype(suffix)} {list(parts.shape(suffix))}" for suffix in parts)
            parts.fail(f"its tensors do not fit each other: {shapes} ({error})")

    def forget(self, name: str) -> None:
        place = self._places[name]
        for stored in (place,) if isinstance(place, str) else place.names:
            self._stored.forget(stored)
