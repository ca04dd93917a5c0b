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
from .architecture import SPLIT_QKV, Architecture
from .architectures import ARCHITECTURES, FACTOR_TENSORS
from .blocks import BLOCKS, matrix, unpack
from .expert_architectures import BARE
from .keys import Keys
from .latent_architectures import BARE as LATENT_BARE
from .latent_architectures import KEYS_UP, VALUES_UP
from .reader import GgufFile
from .recurrent_architectures import BARE as RECURRENT_BARE
from .recurrent_architectures import FLAT, Order

BARE_STEMS = (*BARE, *RECURRENT_BARE, *LATENT_BARE)
SHARED_ROUTER = "ffn_gate_inp_shexp"  # a row that some files store without its axis


class TensorPlace(NamedTuple):
    """Where a tensor lies."""

    file: GgufFile
    stored: str  # name in the file
    part: int | None  # of a stack of `num_parts`: of an expert, or of its gate and up
    num_parts: int = 1
    values: TensorPlace | None = None  # of a matrix in two tensors, for keys and for values: the latter
    rows: slice | None = None  # of a tensor with the rows of several, which are these

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the tensor, or of the part."""
        shape = self.file.tensors[self.stored].shape
        if self.rows is not None:
            return (self.rows.stop - self.rows.start, *shape[1:])
        return shape if self.part is None else (shape[0] * shape[1] // self.num_parts, *shape[2:])

    @property
    def span(self) -> tuple[int, int]:
        """The bytes [begin, end) within those of the whole tensor."""
        if self.rows is not None:
            size = self.num_bytes // self.file.tensors[self.stored].shape[0]
            return self.rows.start * size, self.rows.stop * size
        size = self.num_bytes // self.num_parts
        return (self.part or 0) * size, ((self.part or 0) + 1) * size

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return self.file.tensors[self.stored].num_bytes

    def numbers(self) -> NDArray[np.float32]:
        """The whole tensor in float32."""
        return unpack(self.file.tensors[self.stored].type, self.file.packed(self.stored), self.shape)


class GgufCheckpoint(NamedTensors[TensorPlace]):
    """All tensors of a model in GGUF files, unpacked on access. See `checkpoint.safetensors.Checkpoint`."""

    def __init__(self, root: Path, files: list[GgufFile]) -> None:
        super().__init__(root)
        first = files[0].metadata
        self.architecture: Architecture = ARCHITECTURES[first["general.architecture"]]
        prefix = first["general.architecture"]
        tensors = {tensor for file in files for tensor in file.tensors}
        keys = Keys(first, prefix, {}, tensors)
        num_heads = keys.need("attention.head_count")
        self._num_heads = {"attn_q": num_heads, "attn_k": keys.most("attention.head_count_kv") or num_heads}
        self._keys = keys
        self._names = {**self.architecture.names, **self.architecture.more_names(keys)}
        self._orders = self.architecture.orders(keys)
        end = first[f"{prefix}.block_count"]
        behind = range(end - first.get(f"{prefix}.nextn_predict_layers", 0), end)  # that guess further tokens
        for file in files:
            for stored in file.tensors:
                if _stem(stored) not in FACTOR_TENSORS and not _is_in(stored, behind):
                    self._place(file, stored)
        self._join()
        self.packing = _packing(files)

    def where(self, name: str) -> str:
        """The file that holds a tensor, for error messages."""
        return self._places[name].file.path.name

    def pieces(self, name: str) -> list[StoredPiece]:
        place = self._places[name]
        file, stored = place.file, place.stored
        size = file.tensors[stored].num_bytes
        if place.values is not None:
            return [StoredPiece(one.stored, one.file.path.name, one.num_bytes) for one in (place, place.values)]
        if place.part is None and place.rows is None:
            return [StoredPiece(stored, file.path.name, size)]
        begin, end = place.span
        which = place.part if place.rows is None else f"{place.rows.start}:{place.rows.stop}"
        return [StoredPiece(f"{stored}[{which}]", file.path.name, end - begin)]

    def dtype(self, name: str) -> str:
        """F32, in which `array` gives each tensor."""
        return "F32"

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places[name]
        stored, shape = place.stored, place.shape
        if place.values is not None:
            heads, rank, rows = shape
            return heads * (rows + place.values.shape[1]), rank
        if (kind := _stem(stored)) in FLAT:
            return (math.prod(shape),)
        return (1, *shape) if kind == SHARED_ROUTER and len(shape) == 1 else shape

    def is_mapped(self, name: str) -> bool:
        return False

    def array(self, name: str) -> NDArray[Any]:
        """The tensor in float32, in the order of a Hugging Face file."""
        place = self._places[name]
        if place.values is not None:
            return _joined(place.numbers(), place.values.numbers())
        file, stored = place.file, place.stored
        numbers = unpack(file.tensors[stored].type, self._packed(name), self.shape(name))
        kind = _stem(stored)
        if self.architecture.rotates_pairs and kind in self._num_heads:
            numbers = _in_halves(numbers, self._num_heads[kind])
        if self.architecture.adds_one and stored.endswith("norm.weight") and kind != "ssm_norm":
            numbers = numbers - np.float32(1)
        rows, columns = self._orders.get(kind, Order())
        numbers = numbers if rows is None else numbers[rows]
        return numbers if columns is None else np.ascontiguousarray(numbers[:, columns])

    def grouped(self, name: str) -> GroupedMatrix | str | None:
        """As `NamedTensors.grouped`, with rows in the order of a Hugging Face file."""
        place = self._places[name]
        if place.values is not None:
            return "it lies in two tensors"
        file, stored = place.file, place.stored
        kind, shape, packed = _stem(stored), self.shape(name), self._packed(name)
        begin = place.span[0]

        def drop(first: int, last: int) -> None:
            file.forget(stored, begin + first, begin + last)

        found = matrix(file.tensors[stored].type, packed, shape, drop)
        order = self._orders.get(kind, Order())
        if found is not None and order.columns is not None:
            return "its columns lie in another order"
        if found is not None and order.rows is not None:
            return found.picked(order.rows)
        if found is None or kind not in self._num_heads or not self.architecture.rotates_pairs:
            return found
        return found.picked(_in_halves(np.arange(shape[0]), self._num_heads[kind]))

    def forget(self, name: str) -> None:
        place = self._places[name]
        place.file.forget(place.stored, *place.span)
        if place.values is not None:
            place.values.file.forget(place.values.stored)

    def _packed(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor."""
        place = self._places[name]
        begin, end = place.span
        return place.file.packed(place.stored)[begin:end]

    def _place(self, file: GgufFile, stored: str) -> None:
        """Notes a tensor, or the part of each expert in a stack."""
        name = self._name(stored)
        if SPLIT_QKV in name:
            self._split(file, stored, name)
            return
        if "*" not in name:
            self._places[name] = TensorPlace(file, stored, None)
            return
        names = (
            [name.replace("gate_up_proj", f"{part}_proj") for part in ("gate", "up")] if "gate_up" in name else [name]
        )
        num_parts = file.tensors[stored].shape[0] * len(names)
        for part in range(num_parts):
            expert, which = divmod(part, len(names))
            self._places[names[which].replace("*", str(expert))] = TensorPlace(file, stored, part, num_parts)

    def _split(self, file: GgufFile, stored: str, name: str) -> None:
        """Notes the rows of queries, keys and values of one tensor."""
        heads, kv_heads = self._num_heads.values()
        of_queries, of_keys = (number * self._keys.head_dim for number in (heads, kv_heads))
        end = of_queries + 2 * of_keys
        if (count := file.tensors[stored].shape[0]) != end:
            raise CheckpointError(
                f"{file.path.name}: {shown(stored)} has {count} rows, and {heads} heads of queries and {kv_heads} of "
                f"keys and of values, of {self._keys.head_dim} numbers, have {end}"
            )
        begins = {"q": 0, "k": of_queries, "v": of_queries + of_keys}
        for (letter, begin), after in zip(begins.items(), (of_queries, of_queries + of_keys, end), strict=True):
            self._places[name.replace("?", letter)] = TensorPlace(file, stored, None, rows=slice(begin, after))

    def _join(self) -> None:
        """Makes one matrix of those that make the keys and the values of latents."""
        up, of_values = (f"{self._names.get(stem, stem)}.weight" for stem in (KEYS_UP, VALUES_UP))
        for name in [name for name in self._places if name.endswith(up)]:
            place, stem = self._places.pop(name), name.removesuffix(up)
            values = self._places.pop(stem + of_values, None)
            if values is None or len(place.shape) != 3 or values.shape[::2] != place.shape[:2]:
                raise CheckpointError(
                    f"{place.file.path.name}: {shown(place.stored)} makes keys of shape {list(place.shape)}, and there "
                    "is no tensor of as many heads beside it that makes values"
                )
            self._places[f"{stem}{self._names['attn_kv_b']}.weight"] = place._replace(values=values)

    def _name(self, stored: str) -> str:
        """The Hugging Face name of a stored tensor: blk.3.attn_q.weight is model.layers.3.self_attn.q_proj.weight."""
        number, stem, suffix = _parts(stored)
        if stem not in self._names or (not suffix and stem not in BARE_STEMS):
            raise CheckpointError(
                f"{self.root}: tensor {shown(stored)} is of no known kind in a {self.architecture.model_type} model; "
                "the output would be wrong without it"
            )
        found = self._names[stem]
        found = found.format(number) if "{}" in found else f"model.layers.{number}.{found}" if number else found
        return found + ("" if stem in BARE_STEMS else suffix)


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
    return _parts(stored)[1]


def _parts(stored: str) -> tuple[str, str, str]:
    """Number of the layer, stem and suffix: 3, attn_q and .weight of blk.3.attn_q.weight; 3 and ssm_a of blk.3.ssm_a.

    Each may be empty.
    """
    number, rest = "", stored
    if stored.startswith("blk.") and stored.count(".") >= 2:
        _, number, rest = stored.split(".", 2)
    stem, dot, suffix = rest.rpartition(".")
    return (number, stem, dot + suffix) if suffix in ("weight", "bias") else (number, rest, "")


def _joined(keys: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    """Rows of each head: first those that make keys, then those that make values."""
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, keys.shape[1])


def _in_halves(numbers: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """The rows of each head with the rotated pairs in two halves instead of side by side. Also of a bias."""
    rows = numbers.shape[0]
    pairs = numbers.reshape(num_heads, rows // num_heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(numbers.shape))
