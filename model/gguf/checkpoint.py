"""The tensors of a GGUF file by their Hugging Face names: takes the place of a `Checkpoint` of safetensors."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError, shown
from ..grouped_matrix import GroupedMatrix
from ..named_tensors import NamedTensors, StoredPiece
from .architectures import ARCHITECTURES, FACTOR_TENSORS, Architecture
from .blocks import BLOCKS, matrix, unpack
from .reader import GgufFile


class GgufCheckpoint(NamedTensors[tuple[GgufFile, str]]):
    """All tensors of a model in GGUF files, unpacked on access. See `checkpoint.safetensors.Checkpoint`."""

    def __init__(self, root: Path, files: list[GgufFile]) -> None:
        super().__init__(root)
        first = files[0].metadata
        self.architecture: Architecture = ARCHITECTURES[first["general.architecture"]]
        prefix = first["general.architecture"]
        num_heads = first[f"{prefix}.attention.head_count"]
        self._num_heads = {
            "attn_q": num_heads,
            "attn_k": first.get(f"{prefix}.attention.head_count_kv") or num_heads,
        }
        for file in files:
            for stored in file.tensors:
                if _stem(stored) not in FACTOR_TENSORS:
                    self._places[self._name(stored)] = file, stored
        self.packing = _packing(files)

    def where(self, name: str) -> str:
        """The file that holds a tensor, for error messages."""
        return self._places[name][0].path.name

    def pieces(self, name: str) -> list[StoredPiece]:
        file, stored = self._places[name]
        return [StoredPiece(stored, file.path.name, file.tensors[stored].num_bytes)]

    def dtype(self, name: str) -> str:
        """F32, in which `array` gives each tensor."""
        return "F32"

    def shape(self, name: str) -> tuple[int, ...]:
        file, stored = self._places[name]
        return file.tensors[stored].shape

    def is_mapped(self, name: str) -> bool:
        return False

    def array(self, name: str) -> NDArray[Any]:
        """The tensor in float32, in the order of a Hugging Face file."""
        file, stored = self._places[name]
        tensor = file.tensors[stored]
        numbers = unpack(tensor.type, file.packed(stored), tensor.shape)
        kind = _stem(stored)
        if self.architecture.rotates_pairs and kind in self._num_heads:
            numbers = _in_halves(numbers, self._num_heads[kind])
        if self.architecture.adds_one and kind.endswith("norm"):
            numbers = numbers - np.float32(1)
        return numbers

    def grouped(self, name: str) -> GroupedMatrix | None:
        """The tensor as rows of codes, in the order of a Hugging Face file; None: it is no packed matrix."""
        file, stored = self._places[name]
        tensor, kind = file.tensors[stored], _stem(stored)
        found = matrix(tensor.type, file.packed(stored), tensor.shape, partial(file.forget, stored))
        if found is None or kind not in self._num_heads or not self.architecture.rotates_pairs:
            return found
        return found.picked(_in_halves(np.arange(tensor.shape[0]), self._num_heads[kind]))

    def forget(self, name: str) -> None:
        file, stored = self._places[name]
        file.forget(stored)

    def _name(self, stored: str) -> str:
        """The Hugging Face name of a stored tensor: blk.3.attn_q.weight is model.layers.3.self_attn.q_proj.weight."""
        stem, _, suffix = stored.rpartition(".")
        layer = ""
        if stem.startswith("blk."):
            _, number, stem = stem.split(".", 2) if stem.count(".") >= 2 else ("", "", stem)
            layer = f"model.layers.{number}."
        if stem not in self.architecture.names or suffix not in ("weight", "bias"):
            raise CheckpointError(
                f"{self.root}: tensor {shown(stored)} is of no known kind in a {self.architecture.model_type} model; "
                "the output would be wrong without it"
            )
        return f"{layer}{self.architecture.names[stem]}.{suffix}"


def _packing(files: list[GgufFile]) -> str:
    """GGUF with the types of the matrices, that of most numbers first; empty if none is packed."""
    sizes: Counter[str] = Counter()
    for file in files:
        for tensor in file.tensors.values():
            if BLOCKS[tensor.type].format is not None and len(tensor.shape) == 2:
                sizes[tensor.type] += math.prod(tensor.shape)
    return f"GGUF {', '.join(kind for kind, _ in sizes.most_common())}" if sizes else ""


def _stem(stored: str) -> str:
    """attn_q of blk.3.attn_q.weight."""
    return stored.rpartition(".")[0].rpartition(".")[2] or stored.rpartition(".")[0]


def _in_halves(numbers: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """The rows of each head with the rotated pairs in two halves instead of side by side. Also of a bias."""
    rows = numbers.shape[0]
    pairs = numbers.reshape(num_heads, rows // num_heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(numbers.shape))
