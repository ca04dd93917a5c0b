"""The tensors of a GGUF file by their Hugging Face names: takes the place of a `Checkpoint` of safetensors."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError, shown
from ..grouped_matrix import GroupedMatrix
from ..named_tensors import NamedTensors, StoredPiece
from .architectures import ARCHITECTURES, FACTOR_TENSORS, Architecture
from .blocks import BLOCKS, matrix, unpack
from .expert_architectures import BARE
from .reader import GgufFile

SHARED_ROUTER = "ffn_gate_inp_shexp"  # a row that some files store without its axis


class TensorPlace(NamedTuple):
    """Where a tensor lies."""

    file: GgufFile
    stored: str  # name in the file
    expert: int | None  # of a stack, whose part it is


class GgufCheckpoint(NamedTensors[TensorPlace]):
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
        end = first[f"{prefix}.block_count"]
        behind = range(end - first.get(f"{prefix}.nextn_predict_layers", 0), end)  # that guess further tokens
        for file in files:
            for stored in file.tensors:
                if _stem(stored) not in FACTOR_TENSORS and not _is_in(stored, behind):
                    self._place(file, stored)
        self.packing = _packing(files)

    def where(self, name: str) -> str:
        """The file that holds a tensor, for error messages."""
        return self._places[name].file.path.name

    def pieces(self, name: str) -> list[StoredPiece]:
        file, stored, expert = self._places[name]
        size = file.tensors[stored].num_bytes
        if expert is None:
            return [StoredPiece(stored, file.path.name, size)]
        return [StoredPiece(f"{stored}[{expert}]", file.path.name, size // file.tensors[stored].shape[0])]

    def dtype(self, name: str) -> str:
        """F32, in which `array` gives each tensor."""
        return "F32"

    def shape(self, name: str) -> tuple[int, ...]:
        file, stored, expert = self._places[name]
        shape = file.tensors[stored].shape if expert is None else file.tensors[stored].shape[1:]
        return (1, *shape) if _stem(stored) == SHARED_ROUTER and len(shape) == 1 else shape

    def is_mapped(self, name: str) -> bool:
        return False

    def array(self, name: str) -> NDArray[Any]:
        """The tensor in float32, in the order of a Hugging Face file."""
        file, stored, _ = self._places[name]
        numbers = unpack(file.tensors[stored].type, self._packed(name), self.shape(name))
        kind = _stem(stored)
        if self.architecture.rotates_pairs and kind in self._num_heads:
            numbers = _in_halves(numbers, self._num_heads[kind])
        if self.architecture.adds_one and kind.endswith("norm"):
            numbers = numbers - np.float32(1)
        return numbers

    def grouped(self, name: str) -> GroupedMatrix | None:
        """The tensor as rows of codes, in the order of a Hugging Face file; None: it is no packed matrix."""
        file, stored, expert = self._places[name]
        kind, shape, packed = _stem(stored), self.shape(name), self._packed(name)
        begin = 0 if expert is None else expert * len(packed)

        def drop(first: int, last: int) -> None:
            file.forget(stored, begin + first, begin + last)

        found = matrix(file.tensors[stored].type, packed, shape, drop)
        if found is None or kind not in self._num_heads or not self.architecture.rotates_pairs:
            return found
        return found.picked(_in_halves(np.arange(shape[0]), self._num_heads[kind]))

    def forget(self, name: str) -> None:
        file, stored, expert = self._places[name]
        size = len(self._packed(name))
        file.forget(stored) if expert is None else file.forget(stored, expert * size, (expert + 1) * size)

    def _packed(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor."""
        file, stored, expert = self._places[name]
        packed = file.packed(stored)
        return packed if expert is None else packed.reshape(file.tensors[stored].shape[0], -1)[expert]

    def _place(self, file: GgufFile, stored: str) -> None:
        """Notes a tensor, or the part of each expert in a stack."""
        name = self._name(stored)
        if "*" not in name:
            self._places[name] = TensorPlace(file, stored, None)
            return
        for expert in range(file.tensors[stored].shape[0]):
            self._places[name.replace("*", str(expert))] = TensorPlace(file, stored, expert)

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
        return f"{layer}{self.architecture.names[stem]}" + ("" if stem in BARE else f".{suffix}")


def _packing(files: list[GgufFile]) -> str:
    """GGUF with the types of the matrices, that of most numbers first; empty if none is packed."""
    sizes: Counter[str] = Counter()
    for file in files:
        for tensor in file.tensors.values():
            if BLOCKS[tensor.type].format is not None and len(tensor.shape) in (2, 3):
                sizes[tensor.type] += math.prod(tensor.shape)
    return f"GGUF {', '.join(kind for kind, _ in sizes.most_common())}" if sizes else ""


def _is_in(stored: str, layers: range) -> bool:
    """Whether a tensor is of one of the layers."""
    number = stored.split(".")[1] if stored.startswith("blk.") else ""
    return number.isdecimal() and int(number) in layers


def _stem(stored: str) -> str:
    """attn_q of blk.3.attn_q.weight."""
    return stored.rpartition(".")[0].rpartition(".")[2] or stored.rpartition(".")[0]


def _in_halves(numbers: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """The rows of each head with the rotated pairs in two halves instead of side by side. Also of a bias."""
    rows = numbers.shape[0]
    pairs = numbers.reshape(num_heads, rows // num_heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(numbers.shape))
