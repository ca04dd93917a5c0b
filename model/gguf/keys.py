"""The values of a GGUF file's metadata that an architecture reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_ITEMS = 4096  # of an array of numbers

Config = dict[str, Any]
Factors = NDArray[np.float32]  # [D/2] by which rotary frequencies are divided


class Keys:
    """The values of one architecture, by key without its name in front."""

    def __init__(
        self, metadata: Mapping[str, Any], name: str, factors: Mapping[str, Factors], tensors: Collection[str] = ()
    ) -> None:
        self.metadata, self.name = metadata, name
        self.tensors = tensors  # their names in the file
        self.factors = factors  # the tensors rope_freqs, rope_factors_long, rope_factors_short, where they are
        self.source = f"metadata of {name}"

    def get(self, key: str, default: Any = None) -> Any:
        """The value; arrays are lists. Raises ValueError for one of more items than any model has layers."""
        value = self.metadata.get(f"{self.name}.{key}", default)
        if not isinstance(value, np.ndarray):
            return value
        if len(value) > MOST_ITEMS:
            raise ValueError(f"{self.name}.{key} holds {len(value)} numbers, and at most {MOST_ITEMS} are read")
        return value.tolist()

    def need(self, key: str) -> Any:
        """As `get`. Raises KeyError with the whole key if it is missing."""
        if f"{self.name}.{key}" not in self.metadata:
            raise KeyError(f"{self.name}.{key}")
        return self.get(key)

    def most(self, key: str, default: Any = None) -> Any:
        """As `get`, and of a list with a number for each layer the largest one."""
        value = self.get(key, default)
        return max(value, default=default) if isinstance(value, list) else value

    def number(self, key: str, default: float | None = None) -> float:
        """A float32 of the file as the decimal number that was meant: 1e-05 rather than 9.99999974e-06."""
        value = self.need(key) if default is None else self.get(key, default)
        return float(f"{float(value):.7g}")

    @property
    def head_dim(self) -> int:
        return int(
            self.get("attention.key_length") or self.need("embedding_length") // self.need("attention.head_count")
        )
