"""Random tensors in place of a checkpoint, for load_format "dummy". No torch."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..named_tensors import StoredPiece

PART = 1 << 22  # numbers of a tensor that one thread draws at a time


class RandomTensors:
    """A `TensorSource` of random tensors: N(0, 0.02), norms 1. A tensor's values depend on its name alone."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.warnings: list[str] = []
        self.packing = ""

    def pieces(self, name: str) -> list[StoredPiece]:
        return [StoredPiece(name, "random numbers", 4 * math.prod(self.shapes[name]))]

    def is_mapped(self, name: str) -> bool:
        return False

    def stored_name(self, name: str) -> str:
        return name

    def array(self, name: str) -> NDArray[Any]:
        if name.endswith("norm.weight"):
            return np.ones(self.shapes[name], np.float32)
        numbers = np.empty(self.shapes[name], np.float32)
        flat = numbers.reshape(-1)
        parts = [flat[begin : begin + PART] for begin in range(0, len(flat), PART)]
        if len(parts) <= 1:
            _draw(name, 0, flat)
            return numbers
        with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1)) as threads:  # numpy draws without the GIL
            try:
                drawn = threads.map(partial(_draw, name), range(len(parts)), parts)
            except RuntimeError:  # no threads: one part after the other
                threads.shutdown(cancel_futures=True)
                drawn = map(partial(_draw, name), range(len(parts)), parts)
            list(drawn)
        return numbers

    def grouped(self, name: str) -> None:
        """None: random numbers are not packed."""

    def forget(self, name: str) -> None:
        pass


def _draw(name: str, index: int, part: NDArray[np.float32]) -> None:
    """Fills part `index` of the tensor `name`."""
    text = name if index == 0 else f"{name} {index}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    np.random.Generator(np.random.SFC64(seed)).standard_normal(dtype=np.float32, out=part)
    part *= np.float32(0.02)
