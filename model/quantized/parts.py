"""The stored tensors of one packed layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError


class Stored(Protocol):
    """Tensors by the names that are stored."""

    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str: ...
    def raw(self, name: str) -> NDArray[Any]:
        """The tensor in the type of its storage; 8-bit floats as bytes."""


class Parts:
    """A packed layer: its tensors by suffix, read on access."""

    def __init__(self, stored: Stored, stem: str, names: Mapping[str, str]) -> None:
        self.stem = stem
        self.stored, self.by_suffix = stored, names

    @property
    def names(self) -> list[str]:
        """The stored names."""
        return list(self.by_suffix.values())

    def __contains__(self, suffix: str) -> bool:
        return suffix in self.by_suffix

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_suffix)

    def shape(self, suffix: str) -> tuple[int, ...]:
        return self.stored.shape(self._need(suffix))

    def dtype(self, suffix: str) -> str:
        """The type by safetensors' name."""
        return self.stored.dtype(self._need(suffix))

    def array(self, suffix: str) -> NDArray[Any]:
        return self.stored.raw(self._need(suffix))

    def floats(self, suffix: str) -> NDArray[np.float32]:
        """A tensor of float16, bfloat16 or float32, in float32."""
        array = self.array(suffix)
        if self.dtype(suffix) == "BF16":
            return (array.astype(np.uint32) << 16).view(np.float32)
        return array.astype(np.float32)

    def fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"layer {self.stem}: {problem}; fetch the checkpoint again")

    def _need(self, suffix: str) -> str:
        if suffix not in self.by_suffix:
            self.fail(f"tensor {self.stem}{suffix} is missing")
        return self.by_suffix[suffix]
