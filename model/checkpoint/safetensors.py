"""Memory-mapped safetensors, whose headers are checked before any tensor is used. No pickle and no torch.

A checkpoint is one `model.safetensors`, or several shards with a `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from ..files import checkpoint_file, read_json

HEADER_BYTES = 100_000_000  # largest header that the format allows
BFLOAT16 = np.dtype(np.uint16)  # stands for bfloat16, which numpy lacks: the upper 16 bits of a float32
DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BFLOAT16}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack")


class Checkpoint:
    """All tensors of a checkpoint by name, read from the memory map on access.

    The constructor checks everything and raises CheckpointError naming file and tensor, so later only the disk can
    fail. `prefix` is prepended to each name in the files.
    """

    def __init__(self, root: Path, prefix: str = "") -> None:
        self.root = root
        self._prefix = prefix
        self._shards: dict[str, _Shard] = {}  # by tensor name
        for name in _shard_names(root):
            shard = _Shard(root, name)
            for tensor in shard.entries:
                if tensor in self._shards:
                    raise CheckpointError(f"{name} ({root}): tensor {tensor} is also in {self._shards[tensor].name}")
                self._shards[tensor] = shard

    @property
    def names(self) -> set[str]:
        return {self._prefix + name for name in self._shards}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, as stored."""
        return sum(shard.entries[name].num_bytes for name, shard in self._shards.items())

    def where(self, name: str) -> str:
        """The file that holds a tensor, for error messages."""
        return self._shards[name.removeprefix(self._prefix)].name

    def shape(self, name: str) -> tuple[int, ...]:
        name = name.removeprefix(self._prefix)
        return self._shards[name].entries[name].shape

    def is_mapped(self, name: str) -> bool:
        """Whether `array` is a view of the map. The array of a misaligned tensor is a copy."""
        name = name.removeprefix(self._prefix)
        return self._shards[name].entries[name].is_aligned

    def array(self, name: str) -> NDArray[Any]:
        """The tensor as stored; bfloat16 has the dtype `BFLOAT16`. Do not write to it: it may be a view of the map."""
        name = name.removeprefix(self._prefix)
        return self._shards[name].array(name)

    def forget(self, name: str) -> None:
        """Drops the tensor's pages from this process, once it is copied. A later access reads them again."""
        name = name.removeprefix(self._prefix)
        self._shards[name].forget(name)


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int  # in the file
    num_bytes: int

    @property
    def is_aligned(self) -> bool:
        return self.begin % self.dtype.itemsize == 0


class _Shard:
    """One mapped safetensors file: eight bytes of header length, a JSON header, and the tensors back to back."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        path = checkpoint_file(root, name)
        if path is None:
            raise CheckpointError(f"{name} ({root}): the index names this shard, but there is no such file")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 8:
                self._fail(f"{size} bytes is too short for a safetensors file")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # private: torch wants it writable
        header_bytes = int.from_bytes(self._map[:8], "little")
        if not 2 <= header_bytes <= min(HEADER_BYTES, size - 8):
            self._fail(f"its header claims {header_bytes} bytes of a file of {size}")
        self.entries = self._entries(self._header(self._map[8 : 8 + header_bytes]), 8 + header_bytes, size)

    def array(self, name: str) -> NDArray[Any]:
        entry = self.entries[name]
        raw = np.frombuffer(self._map, np.uint8, entry.num_bytes, entry.begin)
        if not entry.is_aligned:
            raw = raw.copy()
        return raw.view(entry.dtype).reshape(entry.shape)

    def forget(self, name: str) -> None:
        if not hasattr(mmap, "MADV_DONTNEED"):  # no Linux
            return
        entry = self.entries[name]
        begin = -(-entry.begin // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages, as other tensors share the ends
        end = (entry.begin + entry.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _header(self, raw: bytes) -> dict[str, Any]:
        def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for key, value in pairs:
                if key in found:
                    self._fail(f"its header names {key} twice")
                found[key] = value
            return found

        try:
            header = json.loads(raw, object_pairs_hook=without_twins)
        except (ValueError, RecursionError) as error:
            self._fail(f"its header is not valid JSON: {error}")
        if not isinstance(header, dict):
            self._fail("its header is not a JSON object")
        header.pop("__metadata__", None)
        return header

    def _entries(self, header: dict[str, Any], data_begin: int, size: int) -> dict[str, _Entry]:
        """The tensors in file order. They must tile the file, without overlap, gap or rest."""
        entries: dict[str, _Entry] = {}
        position = 0
        for name, value in sorted(header.items(), key=lambda item: self._offsets(*item)):
            dtype, shape = self._dtype(name, value), self._shape(name, value)
            begin, end = self._offsets(name, value)
            if end - begin != math.prod(shape) * dtype.itemsize:
                self._fail(f"tensor {name}: {list(shape)} of {value['dtype']} does not take {end - begin} bytes")
            if begin == end:
                self._fail(f"tensor {name}: has no elements")
            if begin != position:
                self._fail(f"tensor {name}: begins at byte {begin}, but the tensor before it ends at {position}")
            entries[name] = _Entry(dtype, shape, data_begin + begin, end - begin)
            position = end
        if data_begin + position != size:
            self._fail(f"its tensors end at byte {data_begin + position} of {size}; the file is cut or has grown")
        return entries

    def _dtype(self, name: str, value: dict[str, Any]) -> np.dtype[Any]:
        stored = value.get("dtype")
        if not isinstance(stored, str) or stored not in DTYPES:
            self._fail(f"tensor {name}: dtype {stored!r} is not supported; supported: {', '.join(DTYPES)}")
        return DTYPES[stored]

    def _shape(self, name: str, value: dict[str, Any]) -> tuple[int, ...]:
        shape = value.get("shape")
        if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
            self._fail(f"tensor {name}: shape {str(shape)[:80]} is not a list of counts")
        return tuple(shape)

    def _offsets(self, name: str, value: Any) -> tuple[int, int]:
        offsets = value.get("data_offsets") if isinstance(value, dict) else None
        if isinstance(offsets, list) and len(offsets) == 2 and all(type(n) is int for n in offsets):
            begin, end = offsets
            if 0 <= begin <= end:
                return begin, end
        self._fail(f"tensor {name}: data_offsets {str(offsets)[:80]} are not [begin, end)")

    def _fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.name}: {problem}; fetch the file again")


def _shard_names(root: Path) -> list[str]:
    """The safetensors files that make up the checkpoint, in order."""
    index = read_json(root, "model.safetensors.index.json")
    if index is not None:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(map(_is_file_name, weight_map.values())):
            raise CheckpointError(f"model.safetensors.index.json ({root}): weight_map must map tensors to file names")
        return sorted(set(weight_map.values()))
    if checkpoint_file(root, "model.safetensors") is not None:
        return ["model.safetensors"]
    others = sorted(path.name for pattern in PICKLES for path in root.glob(pattern))
    if others:
        raise CheckpointError(
            f"{root}: unsupported weight format: {others[0]}; only safetensors are loaded, as other formats can run "
            "code or lose names; convert the checkpoint, or choose a revision that has model.safetensors"
        )
    raise CheckpointError(f"{root}: no model.safetensors and no model.safetensors.index.json")


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and value.endswith(".safetensors") and "/" not in value and "\\" not in value
